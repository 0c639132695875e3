"""Streamed text: up to the first stop text wherever it lies, the same for all ways to split the text into tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.inference.sampling import TextStream
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


def test_nothing_follows_a_stop_text() -> None:
    stream = TextStream(_Letters(["one <", "|end|> two", " three"]), ["<|end|>"])
    assert [stream.push(0), stream.push(1), stream.push(2), stream.finish()] == ["one ", "", "", ""]
    assert stream.is_stopped and stream.stop_text == "<|end|>"


def test_a_prompt_decides_about_the_first_space() -> None:
    chosen = tokenizer("llama")
    prompt, tokens = chosen.encode("a bad"), chosen.encode("cab")[1:]
    alone, continued = TextStream(chosen), TextStream(chosen, context=prompt)
    assert "".join([*map(alone.push, tokens), alone.finish()]) == "cab"
    assert "".join([*map(continued.push, tokens), continued.finish()]) == " cab"


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="a stop text is empty"):
        TextStream(tokenizer("byte-level"), ["a", ""])
