"""Streamed text: up to the first stop text wherever it lies, the same for all ways to split the text into tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.inference.sampling import TextStream
from megatron.inference.sampling.text_stream import REPLACEMENT, IncrementalDecoder
from megatron.tokenizers.tokenizer import Tokenizer
from tests.inference.sampling.tokenizers import KINDS, tokenizer

STOPS = st.lists(st.text(alphabet="ab c\n", min_size=1, max_size=5), max_size=3)


def _cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop text that is complete first, and that stop text, found letter by letter."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


class _Letters:
    """A tokenizer whose tokens are given pieces of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def encode(self, text: str) -> list[int]:
        return []

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[token] for token in ids)


@given(st.text(alphabet="ab c\n", max_size=25), STOPS, st.data())
def test_the_cut_is_the_same_for_all_splits(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stream = TextStream(_Letters(pieces), stops)
    found = "".join([*(stream.push(token) for token in range(len(pieces))), stream.finish()])
    assert (found, stream.stop_text) == _cut(text, stops)


@given(st.sampled_from(KINDS), st.lists(st.integers(0, 10**6), max_size=30), STOPS)
def test_every_tokenizer(kind: str, numbers: list[int], stops: list[str]) -> None:
    chosen = tokenizer(kind)
    tokens = [number % chosen.vocab_size for number in numbers]
    stream = TextStream(chosen, stops)
    found = "".join([*map(stream.push, tokens), stream.finish()])
    assert (found, stream.stop_text) == _cut(chosen.decode(tokens), stops)
    assert stream.is_stopped == (stream.stop_text is not None)


def test_what_may_be_a_stop_text_is_kept_back_until_it_is_none() -> None:
    stream = TextStream(_Letters(["see </", "s", "> or </", "div", ">"]), ["</s>", "</s >"])
    assert [stream.push(0), stream.push(1)] == ["see ", ""]
    assert [stream.push(3), stream.push(2), stream.finish()] == ["</sdiv", "> or ", "</"]


def test_a_prompt_decides_about_the_first_space() -> None:
    chosen = tokenizer("llama")
    prompt, tokens = chosen.encode("a bad"), chosen.encode("cab")[1:]
    alone, continued = TextStream(chosen), TextStream(chosen, context=prompt)
    assert "".join([*map(alone.push, tokens), alone.finish()]) == "cab"
    assert "".join([*map(continued.push, tokens), continued.finish()]) == " cab"


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="a stop text is empty"):
        TextStream(tokenizer("byte-level"), ["a", ""])


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


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "byte-fallback"])
def test_a_character_that_begins_in_the_context_is_not_lost(kind: str) -> None:
    chosen = tokenizer(kind)
    tokens = chosen.encode("a🜁b")
    border = next(place for place in range(len(tokens)) if REPLACEMENT in chosen.decode(tokens[:place]))
    decoder = IncrementalDecoder(chosen, tokens[:border])
    pieces = [*map(decoder.push, tokens[border:]), decoder.flush()]
    assert "".join(pieces) == "🜁b"


def test_bytes_of_the_context_that_never_become_a_character_are_not_given_out() -> None:
    chosen = tokenizer("byte-level")
    beginning = chosen.encode("👍")[:1]
    for context in (beginning, beginning * 6):
        decoder = IncrementalDecoder(chosen, context)
        assert "".join([*map(decoder.push, chosen.encode("ab")), decoder.flush()]) == "ab"
        decoder = IncrementalDecoder(chosen, context)
        assert decoder.push(beginning[0]) + decoder.flush() == REPLACEMENT
