"""Tokens become text that stops where it should, and deltas know their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.inference.generation import GeneratedToken
from trident.serve.execution.answer_text import AnswerDelta, AnswerText
from trident.serve.requests.served_model import ServedModel


def pushed(served: ServedModel, ids: Sequence[int], finish: str, stop_texts: Sequence[str] = ()) -> list[AnswerDelta]:
    """The deltas of an answer of these tokens."""
    text = AnswerText(served.tokenizer, [served.eod_id or 0], stop_texts, served.stop_ids, keeps_tokens=True)
    deltas = []
    for place, token in enumerate(ids):
        ends = finish if place == len(ids) - 1 else None
        deltas.append(text.push(GeneratedToken("x", token, -0.5, ((token, -0.5), (3, float("-inf"))), ends)))
        if deltas[-1].finish is not None:
            break
    return deltas


def test_pieces_add_up_to_the_text_and_to_the_tokens(served: ServedModel) -> None:
    said = "Straße 👍🏽 漢字, it's"
    ids = served.tokenizer.encode(said)
    deltas = pushed(served, [*ids, served.tokenizer.eod_id], "stop")
    assert "".join(delta.text for delta in deltas) == said and deltas[-1].finish == "stop"
    records = [record for delta in deltas for record in delta.tokens]
    assert [record.token for record in records] == ids
    assert all("\ufffd" not in delta.text for delta in deltas)
    assert records[0].top[1][1] == -9999.0  # JSON has no infinity
    offsets = [record.offset for record in records]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] < len(said)


def test_nothing_of_a_stop_text_leaves(served: ServedModel) -> None:
    ids = served.tokenizer.encode("one two STOP three")
    deltas = pushed(served, ids, "length", ["STOP"])
    assert "".join(delta.text for delta in deltas) == "one two " and deltas[-1].finish == "stop"
    kept = [record.token for delta in deltas for record in delta.tokens]
    assert kept == ids[: len(kept)] and served.tokenizer.decode(kept).rstrip() == "one two"


def test_the_beginning_of_a_stop_text_comes_out_if_nothing_follows(served: ServedModel) -> None:
    ids = served.tokenizer.encode("one STO")
    deltas = pushed(served, ids, "length", ["STOP"])
    assert "".join(delta.text for delta in deltas) == "one STO" and deltas[-1].finish == "length"
    assert [record.token for delta in deltas for record in delta.tokens] == ids


def test_half_a_character_at_the_end_is_shown_as_such(served: ServedModel) -> None:
    ids = served.tokenizer.encode("👍")
    if len(ids) > 1:
        assert "".join(delta.text for delta in pushed(served, ids[:-1], "length")).strip("\ufffd") == ""
    text = AnswerText(served.tokenizer, [1], (), served.stop_ids)
    delta = text.push(GeneratedToken("x", None, finish="cancelled"))
    assert delta.text == "" and delta.finish == "cancelled" and text.generated_tokens == 0
