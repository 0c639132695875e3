"""Incremental decoding: the pieces of any list of tokens add up to its text, for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.inference.sampling.incremental_decoder import REPLACEMENT, IncrementalDecoder
from megatron.tokenizers.tokenizer import Tokenizer
from tests.inference.sampling.tokenizers import KINDS, tokenizer

TEXTS = st.text(alphabet="ab cdef.,'é漢👩\u200d👍🏽\n", max_size=30)


@st.composite
def tokenized(draw: st.DrawFn) -> tuple[Tokenizer, list[int]]:
    """A tokenizer with the tokens of a text, with random tokens, or with both by turns."""
    chosen = tokenizer(draw(st.sampled_from(KINDS)))
    text = TEXTS.map(chosen.encode)
    arbitrary = st.lists(st.integers(0, chosen.vocab_size - 1), max_size=12)
    return chosen, [token for part in draw(st.lists(text | arbitrary, max_size=4)) for token in part]


def _pieces(chosen: Tokenizer, tokens: Sequence[int], **options: int) -> list[str]:
    decoder = IncrementalDecoder(chosen, **options)
    return [*(decoder.push(token) for token in tokens), decoder.flush()]


@given(tokenized(), st.sampled_from([1, 2, 3, 5, 32]))
def test_the_pieces_add_up_to_the_text(case: tuple[Tokenizer, list[int]], window_tokens: int) -> None:
    chosen, tokens = case
    assert "".join(_pieces(chosen, tokens, window_tokens=window_tokens)) == chosen.decode(tokens)


@given(tokenized(), TEXTS)
def test_the_text_continues_a_context(case: tuple[Tokenizer, list[int]], prompt: str) -> None:
    chosen, tokens = case
    context = chosen.encode(prompt)
    before = chosen.decode(context)
    decoder = IncrementalDecoder(chosen, context)
    text = "".join([*map(decoder.push, tokens), decoder.flush()])
    whole = chosen.decode([*context, *tokens])
    assume(whole.startswith(before))  # unless the context ended with bytes that are given up for those that follow
    assert before + text == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_is_decoded_in_windows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tokenizer(kind)
    tokens = chosen.encode("a bad cab, a deaf fée. " * 60)
    lengths = []
    decode = type(chosen).decode
    monkeypatch.setattr(type(chosen), "decode", lambda self, ids: lengths.append(len(ids)) or decode(self, ids))
    pieces = _pieces(chosen, tokens)
    assert max(lengths) <= 65  # and not as many as the text has
    monkeypatch.undo()
    assert len(tokens) > 200 and "".join(pieces) == chosen.decode(tokens)
    assert sum(map(bool, pieces)) > len(tokens) / 2  # it comes as it is generated


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "byte-fallback"])
def test_a_character_comes_whole(kind: str) -> None:
    chosen = tokenizer(kind)
    tokens = chosen.encode("a🜁b")
    pieces = _pieces(chosen, tokens)
    assert len(tokens) > 4 and not any(REPLACEMENT in piece for piece in pieces)
    assert any("🜁" in piece for piece in pieces)


def test_bytes_that_are_no_character_are_shown_at_the_end() -> None:
    chosen = tokenizer("byte-level")
    beginning = chosen.encode("👍")[:1]
    assert _pieces(chosen, beginning) == ["", REPLACEMENT]
    assert _pieces(chosen, beginning * 6)[:4] == ["", "", "", REPLACEMENT]  # the first can no longer change


def test_a_run_of_bytes_that_is_given_up_was_not_given_out() -> None:
    chosen = tokenizer("byte-fallback")
    character = chosen.encode("👍")[1:]
    assert chosen.decode(character) == "👍"
    assert chosen.decode([*character, character[0]]) == REPLACEMENT * 5
    decoder = IncrementalDecoder(chosen)
    assert [decoder.push(token) for token in character] == ["", "", "", ""]
    assert decoder.push(chosen.encode("b")[1]) == "👍b"
