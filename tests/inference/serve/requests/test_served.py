"""Prompts and lengths of the model that is served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.inference.serve.requests.refusals import Refusal
from megatron.inference.serve.requests.served import Served
from megatron.tokenizers.chat import load_chat_template


def test_an_empty_prompt_begins_a_document(served: Served) -> None:
    assert served.prompt_of_text("") == (served.eod_id,) and served.stop_ids == {served.eod_id}
    without = replace(served, eod_id=None)
    assert without.stop_ids == without.chat_stop_ids == frozenset()
    with pytest.raises(Refusal, match="The prompt is empty, and this model has no token to begin with"):
        without.prompt_of_text("")


def test_a_conversation_is_written_by_the_template(served: Served) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert served.prompt_of_messages(messages) == tuple(served.template.prompt_ids(messages, served.tokenizer))
    assert served.eod_id in served.chat_stop_ids


def test_a_conversation_that_the_template_refuses_is_the_clients_fault(served: Served) -> None:
    strict = replace(served, template=load_chat_template("dsgpt2", None))
    with pytest.raises(Refusal, match="dsgpt2") as caught:
        strict.prompt_of_messages([{"role": "system", "content": "x"}])
    assert (caught.value.status, caught.value.parameter) == (400, "messages")


def test_lengths_fit_the_positions_and_the_server(served: Served) -> None:
    assert served.new_tokens(100, None, None) == 28 and served.new_tokens(100, None, 5) == 5
    assert served.new_tokens(100, 28, None) == 28
    for prompt, asked, most, says in (
        (128, None, None, "The prompt has 128 tokens, but this model has 128 positions"),
        (100, 29, None, "The prompt has 100 tokens and 29 were asked for, but this model has 128 positions"),
        (100, 9, 8, "9 tokens were asked for, and this server generates at most 8"),
    ):
        with pytest.raises(Refusal, match=says):
            served.new_tokens(prompt, asked, most)


def test_the_parts_of_a_character_can_be_joined(served: Served) -> None:
    tokens = served.tokenizer.encode("a🦜")
    assert len(tokens) > 2
    assert b"".join(served.token_bytes(token) or b"" for token in tokens) == "a🦜".encode()
    assert served.token_text(tokens[0]) == "a" and served.token_text(tokens[1]).startswith("bytes:\\xf0")
    assert len({served.token_text(token) for token in tokens}) == len(set(tokens))
