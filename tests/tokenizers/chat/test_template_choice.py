"""Where a template comes from, and that it writes what `transformers` writes with it."""

import json

import pytest

from megatron.errors import ConfigError
from megatron.tokenizers.chat import load_chat_template, tokenizer_folder
from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.tokenizers.chat.tokenizers_with_tokens import CHATML_TOKENS, hugging_face_with

TEMPLATE = """{{ bos_token }}{% for message in messages %}

    [{{ message.role }}]{{ message.content }}{{ eos_token }}
{% endfor %}"""
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def config(folder, **entries):
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))


def test_without_a_name_the_tokenizers_own_is_used(tmp_path):
    assert load_chat_template(None, None).name == "plain"
    assert load_chat_template(None, tmp_path).name == "plain"
    config(tmp_path, chat_template=TEMPLATE, bos_token={"content": "<b>"}, eos_token="<e>")
    text = load_chat_template(None, tmp_path).render(MESSAGES, add_generation_prompt=False)
    assert text == "<b>\n    [user]a<e>\n\n    [assistant]b<e>\n"
    (tmp_path / "chat_template.jinja").write_text("{{ messages|length }}{{ eos_token }}")
    assert load_chat_template(None, tmp_path).render(MESSAGES, add_generation_prompt=False) == "2<e>"
    assert load_chat_template("chatml", tmp_path).name == "chatml"


def test_of_several_templates_the_default_is_used(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config(tmp_path, chat_template=named)
    assert load_chat_template(None, tmp_path).render(MESSAGES, add_generation_prompt=False) == "d"
    config(tmp_path, chat_template=named[:1])
    with pytest.raises(ConfigError, match=r"\['tool_use'\], but none named default"):
        load_chat_template(None, tmp_path)


def test_template_of_a_file(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}!")
    assert load_chat_template(str(path), None).render(MESSAGES, add_generation_prompt=False) == "a!"
    config(tmp_path, chat_template="{{ eos_token }}", eos_token="<e>")
    found = load_chat_template(str(tmp_path / "tokenizer_config.json"), None)
    assert found.render(MESSAGES, add_generation_prompt=False) == "<e>"
    config(tmp_path, eos_token="<e>")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json contains no chat_template"):
        load_chat_template(str(tmp_path / "tokenizer_config.json"), None)


def test_unknown_names_and_bad_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--chat-template vicuna is neither plain, chatml, llama, dsgpt2 nor a file"):
        load_chat_template("vicuna", None)
    config(tmp_path, chat_template=7)
    with pytest.raises(ConfigError, match="chat_template holds 7; it must be a string"):
        load_chat_template(None, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"holds \[1\]; it must hold one JSON object"):
        load_chat_template(None, tmp_path)


def test_folder_of_the_tokenizer(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    assert tokenizer_folder(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path=str(tmp_path))) == tmp_path
    assert tokenizer_folder(TokenizerChoice("GPT2BPETokenizer", str(tmp_path / "vocab.json"))) == tmp_path
    assert tokenizer_folder(TokenizerChoice("PretrainedFromHF", tokenizer_name_or_path="gpt2")) is None


# Features that templates of published models use: macros, namespaces, slices, loop variables, whitespace control.
BUSY = """
{%- macro header(role) -%}
<|im_start|>{{ role }}
{% endmacro %}
{%- set state = namespace(turn=0) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system, rest = messages[0]['content'] | trim, messages[1:] %}
{%- else %}
    {%- set system, rest = 'You help. ' ~ (1 + 1), messages %}
{%- endif %}
{{- header('system') + system + '<|im_end|>\\n' }}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate') }}
    {%- endif %}
    {%- set state.turn = state.turn + 1 %}
    {{- header(message.role) }}{{ message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- if loop.last %}({{ {'turn': state.turn, 'tail': rest[-1:]} | tojson }}){% endif %}
    {{- '<|im_end|>' }}
{% endfor %}
{%- if add_generation_prompt is defined and add_generation_prompt %}
    {{- header('assistant') }}
{%- endif %}
"""


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_texts_and_ids_are_those_of_transformers(tmp_path, add_generation_prompt):
    transformers = pytest.importorskip("transformers", reason="the transformers package is not installed")
    tokens = ("<|endoftext|>", *CHATML_TOKENS)
    tokenizer = hugging_face_with(tmp_path, tokens, "<|endoftext|>", BUSY)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    template = load_chat_template(None, tmp_path)
    for conversation in (
        MESSAGES,
        [{"role": "system", "content": " be short\t"}, *MESSAGES],
        [
            {"role": "user", "content": 'quoted "ü" <b>\n'},
            {"role": "assistant", "content": "<think>\nhm</think>\n\nyes"},
        ],
    ):
        text = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=add_generation_prompt)
        assert template.render(conversation, add_generation_prompt=add_generation_prompt) == text
        if add_generation_prompt:
            ids = theirs.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
            assert template.prompt_ids(conversation, tokenizer) == list(ids)


def test_an_empty_template_is_refused_by_its_path(tmp_path):
    path = tmp_path / "chat_template.jinja"
    path.write_text(" \n")
    with pytest.raises(ConfigError, match=f"the chat template {path} is empty"):
        load_chat_template(None, tmp_path)
