"""Evaluation of a tokenizer: round trips, tokens per word, and speed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from megatron.tokenizers.library import Tokenizer

_BATCH = 256  # documents encoded together
_SHOWN_DIFFERENCES = 3
_SHOWN_LETTERS = 30


@dataclass(frozen=True)
class RoundTripDifference:
    """A text that changed in a round trip.

    Args:
        document: its index.
        position: of the first character that differs.
        was, became: some characters from there on.
    """

    document: int
    position: int
    was: str
    became: str


@dataclass
class RoundTrip:
    """Counts over all texts; `seconds` is the time of encoding alone.

    Args:
        inexact: texts that changed.
        differences: the first few of them.
    """

    documents: int = 0
    text_bytes: int = 0
    words: int = 0
    tokens: int = 0
    unknown: int = 0
    inexact: int = 0
    seconds: float = 0.0
    differences: list[RoundTripDifference] = field(default_factory=list)

    def report(self) -> list[str]:
        """Returns the counts as lines of text."""
        seconds = max(self.seconds, 1e-9)
        return [
            f"{self.documents:,} documents, {self.text_bytes:,} bytes, {self.words:,} words, {self.tokens:,} tokens",
            f"fertility: {self.tokens / max(self.words, 1):.3f} tokens per word, "
            f"{self.text_bytes / max(self.tokens, 1):.3f} bytes per token",
            f"unknown: {self.unknown:,} tokens ({self.unknown / max(self.tokens, 1):.4%})",
            f"speed: {self.documents / seconds:,.0f} lines/s, {self.text_bytes / seconds / 1e6:.2f} MB/s on one core",
            f"round trip: {self.documents - self.inexact:,} of {self.documents:,} documents come back byte for byte",
        ]


def round_trip(tokenizer: Tokenizer, texts: Iterable[str]) -> RoundTrip:
    """Encodes and decodes texts; the ids that the tokenizer adds around a text are removed before decoding."""
    outcome = RoundTrip()
    remaining = iter(texts)
    while batch := list(islice(remaining, _BATCH)):
        started_at = time.perf_counter()
        ids, lengths = tokenizer.encode_flat(batch)
        outcome.seconds += time.perf_counter() - started_at
        for text, row in zip(batch, _rows(ids, lengths), strict=True):
            _count(outcome, tokenizer, text, row)
    return outcome


def _count(outcome: RoundTrip, tokenizer: Tokenizer, text: str, row: Sequence[int]) -> None:
    before, after = (len(ids) for ids in tokenizer.added)
    row = row[before : len(row) - after]
    became = tokenizer.decode(row)
    if became != text:
        outcome.inexact += 1
        if len(outcome.differences) < _SHOWN_DIFFERENCES:
            outcome.differences.append(_difference(outcome.documents, text, became))
    outcome.documents += 1
    outcome.text_bytes += len(text.encode("utf-8", errors="surrogatepass"))
    outcome.words += len(text.split())
    outcome.tokens += len(row)
    outcome.unknown += row.count(tokenizer.unknown_id) if tokenizer.unknown_id is not None else 0


def _rows(ids: np.ndarray, lengths: np.ndarray) -> Iterator[list[int]]:
    start = 0
    for length in lengths.tolist():
        yield ids[start : start + length].tolist()
        start += length


def _difference(document: int, text: str, became: str) -> RoundTripDifference:
    pairs = enumerate(zip(text, became, strict=False))
    position = next((index for index, (was, now) in pairs if was != now), min(len(text), len(became)))
    end = position + _SHOWN_LETTERS
    return RoundTripDifference(document, position, text[position:end], became[position:end])
