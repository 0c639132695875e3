"""The demo corpus: the sources and docstrings of the Python installation.

Standard library only, so that it works before anything is installed.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron.errors import DataError
from megatron.files.failures import storage_error
from megatron.files.plain import read_plain
from megatron.files.replacing import check_writable, write_atomically

LEAST_BYTES = 10_000_000
_LEAST_TEXT_LETTERS = 200
_LONGEST_TEXT_LETTERS = 1_000_000
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "site-packages",
        "dist-packages",
        "data",
        "cjkencodings",
        "lib2to3",
        "test_lib2to3",
        "bad",
        "encoded_modules",
        "encodings",  # tables of code points: they crowd out prose and code
    }
)


@dataclass
class DemoCorpus:
    """Size of the written corpus."""

    documents: int = 0
    size_bytes: int = 0


def write_demo_corpus(path: Path, target_bytes: int) -> DemoCorpus:
    """Writes jsonl lines {"text", "src"} until the target size is reached.

    Raises:
        DataError: this Python contains less than 10 MB of text.
        StorageError: the file cannot be written; checked before the work where possible.
    """
    problem = (
        f"bytes of source text are in this Python ({sys.prefix}); {LEAST_BYTES} are required. Use an interpreter with "
        "its full standard library, or train on your own jsonl file."
    )
    return write_corpus(path, corpus_documents, target_bytes, LEAST_BYTES, problem)


def write_corpus(
    path: Path, documents: Callable[[], Iterable[tuple[str, str]]], enough_bytes: int, least_bytes: int, problem: str
) -> DemoCorpus:
    """Writes jsonl lines {"text", "src"} until there are enough bytes; the file appears when it is complete.

    Args:
        documents: yields (source, text) for each.
        problem: follows the number of bytes in the error if there are fewer than `least_bytes`.

    Raises:
        DataError: too few bytes.
        StorageError: the file cannot be written; checked in advance if possible.
    """
    check_writable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise storage_error(path, failure) from failure
    corpus = DemoCorpus()

    def write(stream: BinaryIO) -> None:
        for source, text in documents():
            line = json.dumps({"text": text, "src": source}, ensure_ascii=False)
            corpus.size_bytes += stream.write(line.encode() + b"\n")
            corpus.documents += 1
            if corpus.size_bytes >= enough_bytes:
                return
        if corpus.size_bytes < least_bytes:
            raise DataError(f"Only {corpus.size_bytes} {problem}")

    write_atomically(path, write)
    return corpus


def corpus_documents() -> Iterator[tuple[str, str]]:
    """Yields (source, text) of the standard library, then of the installed packages."""
    paths = sysconfig.get_paths()
    standard = Path(paths["stdlib"])
    yield from _documents_of(standard, "stdlib")
    for name in ("purelib", "platlib"):
        if name == "purelib" or paths[name] != paths["purelib"]:
            yield from _documents_of(Path(paths[name]), name)


def _documents_of(root: Path, title: str) -> Iterator[tuple[str, str]]:
    for path in _source_files(root):
        try:
            text = read_plain(path).decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if not _LEAST_TEXT_LETTERS <= len(text) <= _LONGEST_TEXT_LETTERS or "\x00" in text:
            continue
        source = f"{title}/{path.relative_to(root).as_posix()}"
        prose = "\n\n".join(_docstrings(text))
        if len(prose) >= _LEAST_TEXT_LETTERS:
            yield f"{source}#docstrings", prose
        yield source, text


def _source_files(root: Path) -> Iterator[Path]:
    """Yields Python files below a folder, modules before tests, sorted by name."""
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.endswith("data")]
        paths.extend(Path(folder, name) for name in names if name.endswith(".py"))
    relative = [(path.relative_to(root).as_posix(), path) for path in paths]
    yield from (path for _, path in sorted(relative, key=lambda entry: ("test" in entry[0], entry[0])))


def _docstrings(source: str) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in docstrings if text]
