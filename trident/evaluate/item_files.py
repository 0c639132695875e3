"""The files of tasks: text, jsonl and token files. Errors name the file and the line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.sidecar import check_tokenizer_fits
from megatron.errors import DataError, printable
from megatron.files.plain import open_plain
from megatron.tokenizers.prompts import encode_document, strip_special_tokens
from megatron.tokenizers.tokenizer import Tokenizer

MOST_LINE_BYTES = 64 << 20
MOST_TEXT_BYTES = 1 << 30
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class JsonRow:
    """A line of a jsonl file; `source` names the file and the line in messages."""

    source: str
    values: dict[str, Any]

    def text(self, *keys: str) -> str:
        """The text under the first of these keys that is present.

        Raises:
            DataError: no such key, or its value is not a text.
        """
        for key in keys:
            if key in self.values:
                return checked_text(self.values[key], f'{self.source}: "{key}"')
        known = ", ".join(printable(key) for key in list(self.values)[:8]) or "none"
        choices = " or ".join(f'"{key}"' for key in keys)
        raise DataError(f"{self.source} has no {choices}. Its keys: {known}.")


@dataclass(frozen=True)
class ScoredDocument:
    """A document to score: its text, or its tokens from a token file."""

    source: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Its tokens, without those that start and end a document."""
        if self.tokens is None:
            return encode_document(tokenizer, self.text or "")
        return strip_special_tokens(tokenizer, self.tokens)


def checked_text(value: Any, name: str) -> str:
    """Returns a value that must be a valid Unicode text.

    Raises:
        DataError: not a text, or one with lone surrogates.
    """
    if not isinstance(value, str):
        raise DataError(f"{name} must be a text, not {printable(value)}.")
    surrogate = _LONE_SURROGATE.search(value)
    if surrogate is not None:
        raise DataError(f"{name} holds U+{ord(surrogate.group()):04X}, half of a surrogate pair, which is not a text.")
    return value


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file with their numbers, from 1, without line ends.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or a line is too long.
    """
    try:
        with open_plain(path) as stream:
            number = 0
            while line := stream.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES:
                    raise DataError(
                        f"{path} line {number} is longer than {MOST_LINE_BYTES:,} bytes. Is it the right file?"
                    )
                yield number, _decoded(line, f"{path} line {number}").rstrip("\r\n")
    except (OSError, ValueError) as failure:  # ValueError: a path that no file can have
        reason = getattr(failure, "strerror", None) or failure
        raise DataError(f"{path} cannot be read: {reason}. Give a readable file.") from failure


def read_rows(path: Path) -> Iterator[JsonRow]:
    """The objects of a jsonl file; skips blank lines.

    Raises:
        DataError: as `read_lines`, or a line that is not a JSON object.
    """
    for number, line in read_lines(path):
        source = f"{path} line {number}"
        if number == 1:
            line = line.removeprefix("\ufeff")
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except RecursionError:
            raise DataError(f"{source} is nested too deeply.") from None
        except ValueError as failure:
            raise DataError(f"{source} is not JSON: {failure}. Write one JSON object per line.") from None
        if not isinstance(values, dict):
            raise DataError(f"{source} must be a JSON object, not {printable(values)}.")
        yield JsonRow(source, values)


def read_documents(path: Path, key: str, tokenizer: Tokenizer) -> Iterator[ScoredDocument]:
    """The documents of a file: the lines of a .jsonl, the documents of a token file, or the text of any other file.

    Args:
        key: key of the text in a jsonl line.

    Raises:
        DataError: a missing or damaged file, or one made with another tokenizer.
    """
    prefix = token_prefix(path)
    if path.suffix in (".jsonl", ".json"):
        for row in read_rows(path):
            yield ScoredDocument(row.source, text=row.text(key))
    elif prefix is not None:
        yield from _token_documents(prefix, tokenizer)
    else:
        yield ScoredDocument(str(path), text=_whole_text(path))


def token_prefix(path: Path) -> str | None:
    """The prefix of a pair of token files, given with or without ending; None if the path is no such pair."""
    if path.suffix in (".bin", ".idx"):
        return str(path.with_suffix(""))
    is_pair = not path.is_file() and Path(f"{path}.idx").is_file()
    return str(path) if is_pair else None


def _token_documents(prefix: str, tokenizer: Tokenizer) -> Iterator[ScoredDocument]:
    check_tokenizer_fits([prefix], tokenizer)
    dataset = IndexedDataset(prefix)
    bounds = dataset.documents.tolist()
    for number, (start, stop) in enumerate(pairwise(bounds)):
        tokens = tuple(int(token) for part in range(start, stop) for token in dataset[part])
        worst = max(tokens, default=0)
        if worst >= tokenizer.vocab_size or min(tokens, default=0) < 0:
            raise DataError(
                f"{prefix} document {number} holds the token {worst if worst > 0 else min(tokens)}, and the tokenizer "
                f"has {tokenizer.vocab_size}. Was it made with another one?"
            )
        yield ScoredDocument(f"{prefix} document {number}", tokens=tokens)


def _whole_text(path: Path) -> str:
    try:
        with open_plain(path) as stream:
            content = stream.read(MOST_TEXT_BYTES + 1)
    except (OSError, ValueError) as failure:  # ValueError: a path that no file can have
        reason = getattr(failure, "strerror", None) or failure
        raise DataError(f"{path} cannot be read: {reason}. Give a readable file.") from failure
    if len(content) > MOST_TEXT_BYTES:
        raise DataError(f"{path} holds more than {MOST_TEXT_BYTES:,} bytes. Split it, or give a token file.")
    return _decoded(content, str(path)).removeprefix("\ufeff")


def _decoded(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise DataError(f"{source} is not UTF-8 text: {failure.reason} at byte {failure.start}.") from None
