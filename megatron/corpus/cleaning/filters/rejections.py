"""Why a document is rejected, and the filters of length and language."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.corpus.cleaning.documents.clean_options import LengthLimits
from megatron.corpus.cleaning.filters.language import LanguageFilter
from megatron.tokenizers.tokenizer import Tokenizer, build_tokenizer

BAD_LINE = "bad line"
EMPTY = "empty"
LANGUAGE = "language"
CONTAMINATED = "contaminated"
EXACT_DUPLICATE = "exact duplicate"
NEAR_DUPLICATE = "near duplicate"
REPAIRED = "text repaired"
SPACES = "spaces normalized"
CUT = "contamination cut out"


@dataclass(frozen=True)
class Rejection:
    """Why a document is dropped: one of a few reasons, which are counted, and what was found in this document."""

    reason: str
    detail: str = ""


class DocumentFilter(Protocol):
    """Decides about each document by itself; gets many at a time."""

    def rejections(self, texts: Sequence[str]) -> list[Rejection | None]: ...


class LanguageCheck:
    """Drops texts in other languages; see `LanguageFilter`."""

    def __init__(self, languages: LanguageFilter) -> None:
        self._languages = languages

    def rejections(self, texts: Sequence[str]) -> list[Rejection | None]:
        """A rejection for each text, None where it stays."""
        faults = (self._languages.fault(text) for text in texts)
        return [None if fault is None else Rejection(LANGUAGE, fault) for fault in faults]


class CharacterCount:
    """Drops texts with too few or too many characters."""

    def __init__(self, limits: LengthLimits) -> None:
        self._least, self._most = limits.minimum_characters, limits.maximum_characters

    def rejections(self, texts: Sequence[str]) -> list[Rejection | None]:
        """A rejection for each text, None where it stays."""
        return [_out_of_range(len(text), self._least, self._most, "characters") for text in texts]


class WordCount:
    """Drops texts with too few or too many words, which are what spaces separate."""

    def __init__(self, limits: LengthLimits) -> None:
        self._least, self._most = limits.minimum_words, limits.maximum_words

    def rejections(self, texts: Sequence[str]) -> list[Rejection | None]:
        """A rejection for each text, None where it stays."""
        return [_out_of_range(len(text.split()), self._least, self._most, "words") for text in texts]


class TokenCount:
    """Drops texts with too few or too many tokens.

    Raises:
        ConfigError: the tokenizer's flags are wrong.
        DataError: the tokenizer's files are damaged.
    """

    def __init__(self, limits: LengthLimits) -> None:
        self._least, self._most = limits.minimum_tokens, limits.maximum_tokens
        self._tokenizer: Tokenizer = build_tokenizer(limits.tokenizer)  # type: ignore[arg-type]

    def rejections(self, texts: Sequence[str]) -> list[Rejection | None]:
        """A rejection for each text, None where it stays."""
        _, lengths = self._tokenizer.encode_flat(list(texts))
        return [_out_of_range(int(length), self._least, self._most, "tokens") for length in lengths]


def _out_of_range(value: int, least: int | None, most: int | None, unit: str) -> Rejection | None:
    if least is not None and value < least:
        return Rejection(f"too few {unit}", str(value))
    if most is not None and value > most:
        return Rejection(f"too many {unit}", str(value))
    return None
