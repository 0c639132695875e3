"""Reasons for rejecting documents, and the length filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.tokenizers.tokenizer import build_tokenizer
from trident.corpus.cleaning.documents.clean_options import LengthLimits

BAD_LINE = "bad line"
EMPTY = "empty"
LANGUAGE = "language"
CONTAMINATED = "contaminated"
EXACT_DUPLICATE = "exact duplicate"
NEAR_DUPLICATE = "near duplicate"
REPAIRED = "text repaired"
SPACES = "spaces normalized"
CUT = "contamination cut out"

Count = Callable[[Sequence[str]], Iterable[int]]


@dataclass(frozen=True)
class Rejection:
    """The reason for dropping a document, which is counted, with details for this document."""

    reason: str
    detail: str = ""


DocumentFilter = Callable[[Sequence[str]], list[Rejection | None]]
"""Returns a rejection for each text, or None if it is kept."""


def length_filters(limits: LengthLimits) -> Iterator[DocumentFilter]:
    """Yields a filter for each unit with a limit, cheap ones first; words are separated by spaces.

    Raises:
        ConfigError: the tokenizer's flags are wrong.
        DataError: the tokenizer's files are damaged.
    """

    def counting(unit: str, least: int | None, most: int | None, count: Count) -> Iterator[DocumentFilter]:
        if least is not None or most is not None:
            yield lambda texts: [_out_of_range(int(number), least, most, unit) for number in count(texts)]

    yield from counting(
        "characters", limits.minimum_characters, limits.maximum_characters, lambda texts: map(len, texts)
    )
    yield from counting(
        "words", limits.minimum_words, limits.maximum_words, lambda texts: (len(text.split()) for text in texts)
    )
    if limits.tokenizer is not None and (limits.minimum_tokens, limits.maximum_tokens) != (None, None):
        tokenizer = build_tokenizer(limits.tokenizer)

        def lengths(texts: Sequence[str]) -> Iterable[int]:
            return tokenizer.encode_flat(list(texts))[1]

        yield from counting("tokens", limits.minimum_tokens, limits.maximum_tokens, lengths)


def _out_of_range(value: int, least: int | None, most: int | None, unit: str) -> Rejection | None:
    if least is not None and value < least:
        return Rejection(f"too few {unit}", str(value))
    if most is not None and value > most:
        return Rejection(f"too many {unit}", str(value))
    return None
