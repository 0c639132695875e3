"""Splits texts into sentences, for objectives that pair sentences (BERT) and for data packed by sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.errors import ConfigError
from megatron.tokenizers.encoders.fast_encoder import catch_rust_panics

_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*")
# Upstream's --lang takes names of NLTK's models.
_CODE_OF_NAME = {
    "czech": "cs", "danish": "da", "dutch": "nl", "english": "en", "estonian": "et", "finnish": "fi", "french": "fr",
    "german": "de", "greek": "el", "italian": "it", "malayalam": "ml", "norwegian": "no", "polish": "pl",
    "portuguese": "pt", "russian": "ru", "slovene": "sl", "spanish": "es", "swedish": "sv", "turkish": "tr",
}  # fmt: skip
# The library counts these as one byte after a capital before a full stop (sentencex 1.0.32), and fails.
_WIDE_SPACE = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
_PARAGRAPH_END = re.compile(r"\n\r*\n[\r\n]*")
_PART_LETTERS = 4 << 20


@dataclass(frozen=True)
class SentenceSplitter:
    """Splits texts into sentences by the rules of `sentencex` (abbreviations, quotes, numbers, scripts).

    Args:
        language: ISO 639 code, or a name supported by upstream's tool (english); the library uses the rules of a
            related language or of English for languages without rules.
        keep_newlines: keep the whitespace between two sentences at the end of the first, so that all sentences joined
            are the text; otherwise it is removed, also at both ends of the text.

    Raises:
        ConfigError: the language is not a valid code, or the library is not installed.
    """

    language: str = "en"
    keep_newlines: bool = False

    def __post_init__(self) -> None:
        if not _LANGUAGE.fullmatch(_code(self.language)):
            raise ConfigError(
                f"--lang {self.language} is not a language. Use an ISO 639 code like en, tr or zh, or one of the names "
                f"{', '.join(_CODE_OF_NAME)}."
            )
        _library()

    def split(self, text: str) -> list[str]:
        """Returns the non-empty sentences of a text in order; whitespace alone is none unless it is kept."""
        return [sentence for batch in self.batches(text) for sentence in batch]

    def batches(self, text: str) -> Iterator[list[str]]:
        """Yields the sentences of a text, some millions of characters at a time, since paragraphs are independent."""
        leading = ""
        for part in _parts(text):
            if not self.keep_newlines:
                yield [sentence for segment in self._segments(part) if (sentence := segment.strip())]
                continue
            sentences: list[str] = []
            for segment in self._segments(part):
                if not segment.isspace():
                    sentences.append(leading + segment)
                    leading = ""
                elif sentences:
                    sentences[-1] += segment
                else:
                    leading += segment
            yield sentences
        if leading:
            yield [leading]

    def _segments(self, text: str) -> Sequence[str]:
        """Splits the whole text into sentences and whitespace between paragraphs."""
        has_wide = not text.isascii() and _WIDE_SPACE.search(text) is not None
        narrow = _WIDE_SPACE.sub(" ", text) if has_wide else text
        try:
            sentences: list[str] = catch_rust_panics(lambda: _library().segment(_code(self.language), narrow))
        except ValueError:  # any failure: splitting at line ends is the reproducible fallback
            return text.splitlines(keepends=True)
        segments = sentences if sum(map(len, sentences)) == len(text) else _with_gaps(narrow, sentences)
        return list(_cut_alike(text, segments)) if has_wide else segments


def _parts(text: str) -> Iterator[str]:
    """Yields a long text in parts that end with a paragraph."""
    start = 0
    while len(text) - start > _PART_LETTERS and (end := _PARAGRAPH_END.search(text, start + _PART_LETTERS)):
        yield text[start : end.end()]
        start = end.end()
    yield text[start:] if start else text


def _with_gaps(text: str, sentences: Sequence[str]) -> list[str]:
    """Returns sentences with the text missing between them: the library drops and rewrites ends of paragraphs."""
    segments: list[str] = []
    reached = 0
    for sentence in sentences:
        start = -1 if sentence.isspace() else text.find(sentence, reached)
        if start < 0:
            continue
        if start > reached:
            segments.append(text[reached:start])
        segments.append(sentence)
        reached = start + len(sentence)
    if reached < len(text):
        segments.append(text[reached:])
    return segments


def _code(language: str) -> str:
    return _CODE_OF_NAME.get(language.lower(), language)


def _cut_alike(text: str, segments: Sequence[str]) -> Iterator[str]:
    """Cuts a text like another one of the same length."""
    start = 0
    for segment in segments:
        yield text[start : start + len(segment)]
        start += len(segment)


def _library() -> Any:
    try:
        import sentencex
    except ImportError as failure:
        raise ConfigError(
            "--split-sentences requires the sentencex package: pip install 'trident-megatron[data]' (or sentencex)."
        ) from failure
    return sentencex
