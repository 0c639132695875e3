"""Prompts and lengths of the model that is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.inference.loaded_model import LoadedModel, open_checkpoint
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.chat import load_chat_template
from tests.inference.checkpoints import make_checkpoint
from tests.tokenizers.chat.tokenizers_with_tokens import DSGPT2_TOKENS
from tests.trident.evaluate.fakes import ByteTokenizer
from trident.serve.requests.refusals import Refusal
from trident.serve.requests.served_model import ServedModel, build_served_model, model_name


def test_an_empty_prompt_begins_a_document(served: ServedModel) -> None:
    assert served.prompt_of_text("") == (served.eod_id,) and served.stop_ids == {served.eod_id}
    without = replace(served, eod_id=None)
    assert without.stop_ids == without.chat_stop_ids == frozenset()
    with pytest.raises(Refusal, match="The prompt is empty, and this model has no token to begin with"):
        replace(without, tokenizer=ByteTokenizer(has_eod=False)).prompt_of_text("")


def test_a_conversation_is_written_by_the_template(served: ServedModel) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert served.prompt_of_messages(messages) == tuple(served.template.prompt_ids(messages, served.tokenizer))
    assert served.eod_id in served.chat_stop_ids


def test_a_conversation_that_the_template_refuses_is_the_clients_fault(served: ServedModel) -> None:
    strict = replace(served, template=load_chat_template("dsgpt2", None))
    with pytest.raises(Refusal, match="dsgpt2") as caught:
        strict.prompt_of_messages([{"role": "system", "content": "x"}])
    assert (caught.value.status, caught.value.parameter) == (400, "messages")


def test_lengths_fit_the_positions_and_the_server(served: ServedModel) -> None:
    assert served.new_tokens(100, None, None) == 28 and served.new_tokens(100, None, 5) == 5
    assert served.new_tokens(100, 28, None) == 28
    for prompt, asked, most, says in (
        (128, None, None, "The prompt has 128 tokens, but this model has 128 positions"),
        (100, 29, None, "The prompt has 100 tokens and 29 were requested, but this model has 128 positions"),
        (100, 9, 8, "9 tokens were requested, and this server generates at most 8"),
    ):
        with pytest.raises(Refusal, match=says):
            served.new_tokens(prompt, asked, most)


def test_the_parts_of_a_character_can_be_joined(served: ServedModel) -> None:
    tokens = served.tokenizer.encode("a🦜")
    assert len(tokens) > 2
    assert b"".join(served.token_bytes(token) or b"" for token in tokens) == "a🦜".encode()
    assert served.token_text(tokens[0]) == "a" and served.token_text(tokens[1]).startswith("bytes:\\xf0")
    assert len({served.token_text(token) for token in tokens}) == len(set(tokens))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A checkpoint of a run that was fine-tuned with dsGPT2's template."""
    folder = tmp_path_factory.mktemp("chat")
    checkpoints = make_checkpoint(folder, "--chat-template", "dsgpt2", more_tokens=DSGPT2_TOKENS)
    return open_checkpoint(str(checkpoints), {}, ParallelMesh.single())


def test_the_template_is_that_of_the_fine_tuning_unless_one_is_given(loaded: LoadedModel) -> None:
    served = build_served_model(loaded)
    assert served.template.name == "dsgpt2" and served.is_chat and served.name == loaded.path.parents[1].name
    assert (
        served.tokenizer.decode(served.prompt_of_messages([{"role": "user", "content": "q"}]))
        == "<usr><s>q</s><sys><s>"
    )
    plain = build_served_model(loaded, "mine", "plain")
    assert plain.template.name == "plain" and plain.is_chat and plain.name == "mine"
    assert plain.fingerprint != served.fingerprint == build_served_model(loaded).fingerprint


def test_a_model_without_a_template_continues_texts(loaded: LoadedModel) -> None:
    finetuning = replace(loaded.config.finetuning, chat_template=None)
    pretrained = replace(loaded, config=replace(loaded.config, finetuning=finetuning))
    served = build_served_model(pretrained)
    assert served.template.name == "plain" and not served.is_chat
    assert (served.positions, served.vocab_size) == (48, loaded.vocab_size)


def test_a_template_needs_its_tokens(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template llama requires the special tokens .*<\|eot_id\|>"):
        build_served_model(loaded, chat_template="llama")


def test_the_name_is_that_of_the_folder(tmp_path: Path) -> None:
    assert model_name(tmp_path / "chat" / "iter_0000003") == "chat" and model_name(Path("/iter_0000003")) == "model"
