"""Tokens become text that stops where it should, and pieces know their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.inference.generation import GeneratedToken
from trident.serve.execution.answer_text import AnswerPiece, AnswerText
from trident.serve.requests.served import Served


def pushed(served: Served, ids: Sequence[int], finish: str, stop_texts: Sequence[str] = ()) -> list[AnswerPiece]:
    """The pieces of an answer of these tokens."""
    text = AnswerText(served.tokenizer, [served.eod_id or 0], stop_texts, served.stop_ids, keeps_tokens=True)
    pieces = []
    for place, token in enumerate(ids):
        ends = finish if place == len(ids) - 1 else None
        pieces.append(text.push(GeneratedToken("x", token, -0.5, ((token, -0.5), (3, float("-inf"))), ends)))
        if pieces[-1].finish is not None:
            break
    return pieces


def test_pieces_add_up_to_the_text_and_to_the_tokens(served: Served) -> None:
    said = "Straße 👍🏽 漢字, it's"
    ids = served.tokenizer.encode(said)
    pieces = pushed(served, [*ids, served.tokenizer.eod_id], "stop")
    assert "".join(piece.text for piece in pieces) == said and pieces[-1].finish == "stop"
    records = [record for piece in pieces for record in piece.tokens]
    assert [record.token for record in records] == ids
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert records[0].top[1][1] == -9999.0  # JSON has no infinity
    offsets = [record.offset for record in records]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] < len(said)


def test_nothing_of_a_stop_text_leaves(served: Served) -> None:
    ids = served.tokenizer.encode("one two STOP three")
    pieces = pushed(served, ids, "length", ["STOP"])
    assert "".join(piece.text for piece in pieces) == "one two " and pieces[-1].finish == "stop"
    kept = [record.token for piece in pieces for record in piece.tokens]
    assert kept == ids[: len(kept)] and served.tokenizer.decode(kept).rstrip() == "one two"


def test_the_beginning_of_a_stop_text_comes_out_if_nothing_follows(served: Served) -> None:
    ids = served.tokenizer.encode("one STO")
    pieces = pushed(served, ids, "length", ["STOP"])
    assert "".join(piece.text for piece in pieces) == "one STO" and pieces[-1].finish == "length"
    assert [record.token for piece in pieces for record in piece.tokens] == ids


def test_half_a_character_at_the_end_is_shown_as_such(served: Served) -> None:
    ids = served.tokenizer.encode("👍")
    if len(ids) > 1:
        assert "".join(piece.text for piece in pushed(served, ids[:-1], "length")).strip("\ufffd") == ""
    text = AnswerText(served.tokenizer, [1], (), served.stop_ids)
    piece = text.push(GeneratedToken("x", None, finish="cancelled"))
    assert piece.text == "" and piece.finish == "cancelled" and text.generated_tokens == 0
