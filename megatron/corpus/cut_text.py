"""Running text cut into documents, so that a part of it can be held out for validation.

A split of token files gives whole documents to training and validation, and a book in one file would be one document.
A cut is made at the first blank line after `_PIECE_LETTERS`, long compared with a sample and short compared with a
book, and wherever a line says `<|endoftext|>`, which is how corpora in plain text separate their documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO

from megatron.errors import DataError
from megatron.files.failures import storage_error
from megatron.files.plain import open_plain
from megatron.files.replacing import write_atomically

END_OF_TEXT = "<|endoftext|>"
_PIECE_LETTERS = 16_384
_LINE_LETTERS = 1 << 20  # a longer line is cut


def pieces(lines: Iterable[str]) -> Iterator[str]:
    """The documents of running text, given line by line with its line ends."""
    held: list[str] = []
    letters = 0
    for line in lines:
        is_end = line.strip() == END_OF_TEXT
        if not is_end:
            held.append(line)
            letters += len(line)
        if held and (is_end or (letters >= _PIECE_LETTERS and not line.strip()) or letters >= _LINE_LETTERS):
            yield "".join(held)
            held, letters = [], 0
    if held:
        yield "".join(held)


def write_pieces(paths: Iterable[str], output: Path) -> None:
    """Writes the documents of UTF-8 files as jsonl.

    Raises:
        DataError: a file is not UTF-8.
        StorageError: a file cannot be read, or the output cannot be written.
    """
    write_atomically(output, lambda stream: _write(paths, stream))


def _write(paths: Iterable[str], stream: BinaryIO) -> None:
    for path in paths:
        for text in pieces(_lines(path)):
            if text.strip():
                stream.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")


def _lines(path: str) -> Iterator[str]:
    try:
        with TextIOWrapper(open_plain(path), encoding="utf-8-sig", newline="") as file:
            while line := file.readline(_LINE_LETTERS):
                yield line
    except UnicodeDecodeError as failure:
        raise DataError(
            f"{path}: byte {failure.start} of a block is not UTF-8 ({failure.reason}). Convert the file first: "
            f"iconv -f WINDOWS-1252 -t UTF-8 {path} (or whatever its encoding is)."
        ) from failure
    except OSError as failure:
        raise storage_error(Path(path), failure) from failure
