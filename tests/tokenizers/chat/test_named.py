"""The templates by name: their text to the letter, and the tokens they need."""

import pytest

from megatron.errors import DataError
from megatron.tokenizers.chat import load_chat_template
from megatron.tokenizers.chat.named import SOURCES

CONVERSATION = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
)
SYSTEM = {"role": "system", "content": "Be short."}

TEXTS = {
    "plain": "What is 2 + 2?\n4And 3 + 3?\n",
    "chatml": (
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nAnd 3 + 3?<|im_end|>\n"
    ),
    "llama": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is 2 + 2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd 3 + 3?<|eot_id|>"
    ),
    "dsgpt2": "<usr><s>What is 2 + 2?</s><sys><s>4</s><usr><s>And 3 + 3?</s>",
}
PROMPTS = {
    "plain": "",
    "chatml": "<|im_start|>assistant\n",
    "llama": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "dsgpt2": "<sys><s>",
}
SYSTEM_TEXTS = {
    "plain": "Be short.\n",
    "chatml": "<|im_start|>system\nBe short.<|im_end|>\n",
    "llama": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe short.<|eot_id|>",
}


@pytest.mark.parametrize("name", SOURCES)
def test_conversation_is_written_to_the_letter(name):
    template = load_chat_template(name, None)
    assert template.render(CONVERSATION, add_generation_prompt=False) == TEXTS[name]
    assert template.render(CONVERSATION, add_generation_prompt=True) == TEXTS[name] + PROMPTS[name]


@pytest.mark.parametrize("name", SYSTEM_TEXTS)
def test_system_message_is_written(name):
    assert load_chat_template(name, None).render([SYSTEM], add_generation_prompt=False) == SYSTEM_TEXTS[name]


def test_dsgpt2_refuses_system_messages():
    with pytest.raises(DataError, match="dsgpt2 has no system messages"):
        load_chat_template("dsgpt2", None).render([SYSTEM, *CONVERSATION], add_generation_prompt=False)
