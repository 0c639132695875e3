"""Texts to sentences, for objectives that pair sentences (BERT) and for data that is packed by sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.errors import ConfigError
from megatron.tokenizers.encoders.fast_encoder import catch_rust_panics

_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*")
# Upstream's --lang takes the names of NLTK's models.
_CODE_OF_NAME = {
    "czech": "cs", "danish": "da", "dutch": "nl", "english": "en", "estonian": "et", "finnish": "fi", "french": "fr",
    "german": "de", "greek": "el", "italian": "it", "malayalam": "ml", "norwegian": "no", "polish": "pl",
    "portuguese": "pt", "russian": "ru", "slovene": "sl", "spanish": "es", "swedish": "sv", "turkish": "tr",
}  # fmt: skip
# The library counts these as one byte where they follow a capital before a full stop (sentencex 1.0.32), and gives up.
_WIDE_SPACE = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
_PARAGRAPH_END = re.compile(r"\n\r*\n[\r\n]*")
_PART_LETTERS = 4 << 20


@dataclass(frozen=True)
class SentenceSplitter:
    """Cuts texts into sentences by the rules of `sentencex` (abbreviations, quotes, numbers, scripts).

    Args:
        language: ISO 639 code, or one of the names that upstream's tool takes (english); a language that the library
            has no rules for is cut by the rules of a related one or of English.
        keep_newlines: the whitespace between two sentences stays at the end of the first, so that all sentences back to
            back are the text; otherwise it is dropped, also at both ends of the text.

    Raises:
        ConfigError: the language is not written as a language code, or the library is not installed.
    """

    language: str = "en"
    keep_newlines: bool = False

    def __post_init__(self) -> None:
        if not _LANGUAGE.fullmatch(_code(self.language)):
            raise ConfigError(
                f"--lang {self.language} is not a language. Give a code of ISO 639 like en, tr or zh, or one of the "
                f"names "
                f"{', '.join(_CODE_OF_NAME)}."
            )
        _library()

    def split(self, text: str) -> list[str]:
        """The sentences of a text in order; none is empty, and a text of whitespace has none unless it is kept."""
        return [sentence for batch in self.batches(text) for sentence in batch]

    def batches(self, text: str) -> Iterator[list[str]]:
        """The sentences of a text, some millions of characters at a time: its paragraphs do not depend on each
        other.
        """
        leading = ""
        for part in _parts(text):
            if not self.keep_newlines:
                yield [sentence for piece in self._pieces(part) if (sentence := piece.strip())]
                continue
            sentences: list[str] = []
            for piece in self._pieces(part):
                if not piece.isspace():
                    sentences.append(leading + piece)
                    leading = ""
                elif sentences:
                    sentences[-1] += piece
                else:
                    leading += piece
            yield sentences
        if leading:
            yield [leading]

    def _pieces(self, text: str) -> Sequence[str]:
        """Stretches of the text that make up all of it: sentences, and whitespace between paragraphs."""
        has_wide = not text.isascii() and _WIDE_SPACE.search(text) is not None
        narrow = _WIDE_SPACE.sub(" ", text) if has_wide else text
        try:
            sentences: list[str] = catch_rust_panics(lambda: _library().segment(_code(self.language), narrow))
        except ValueError:  # whatever it failed on: splitting at line ends is the fallback, the same in every run
            return text.splitlines(keepends=True)
        pieces = sentences if sum(map(len, sentences)) == len(text) else _with_gaps(narrow, sentences)
        return list(_stretches(text, pieces)) if has_wide else pieces


def _parts(text: str) -> Iterator[str]:
    """A text, cut after the end of a paragraph whenever it has become long."""
    start = 0
    while len(text) - start > _PART_LETTERS and (end := _PARAGRAPH_END.search(text, start + _PART_LETTERS)):
        yield text[start : end.end()]
        start = end.end()
    yield text[start:] if start else text


def _with_gaps(text: str, sentences: Sequence[str]) -> list[str]:
    """Sentences, with all that is missing between them: the library drops some at the end of a paragraph, and writes
    the ends of paragraphs in its own way.
    """
    pieces: list[str] = []
    reached = 0
    for sentence in sentences:
        start = -1 if sentence.isspace() else text.find(sentence, reached)
        if start < 0:
            continue
        if start > reached:
            pieces.append(text[reached:start])
        pieces.append(sentence)
        reached = start + len(sentence)
    if reached < len(text):
        pieces.append(text[reached:])
    return pieces


def _code(language: str) -> str:
    return _CODE_OF_NAME.get(language.lower(), language)


def _stretches(text: str, pieces: Sequence[str]) -> Iterator[str]:
    """Cuts a text as another of the same length was cut."""
    start = 0
    for piece in pieces:
        yield text[start : start + len(piece)]
        start += len(piece)


def _library() -> Any:
    try:
        import sentencex
    except ImportError as failure:
        raise ConfigError(
            "--split-sentences needs the sentencex package: pip install 'trident-megatron[data]' (or sentencex)."
        ) from failure
    return sentencex
