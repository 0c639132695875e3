"""Writes a real corpus without a download: the sources and docstrings that come with every Python installation.

    python tools/build_demo_corpus.py --output demo.jsonl

Each line is {"text": ..., "src": ...}. One interpreter always gives the same bytes.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.config.flags import Area, flag, parse_flags
from megatron.data.atomic_files import storage_error, write_atomically
from megatron.errors import DataError

_LEAST_BYTES = 10_000_000
_LEAST_TEXT_LETTERS = 200
_LONGEST_TEXT_LETTERS = 1_000_000
_LEFT_OUT_FOLDERS = frozenset(
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
    }
)


@dataclass(frozen=True)
class DemoCorpusFlags(Area):
    """What this tool asks for."""

    output: str = flag(help="jsonl file to write")
    megabytes: float = flag(
        11.0, "stop after so many megabytes (1 MB = 10^6 bytes), installed packages included", at_least=10.0
    )


def main() -> int:
    """Runs the tool on the command line's flags."""
    flags = parse_flags(DemoCorpusFlags, sys.argv[1:], prog="build_demo_corpus.py", description=__doc__ or "")
    path = Path(flags.output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise storage_error(path, failure) from failure
    tally = _Tally()
    write_atomically(path, lambda stream: _write(stream, int(flags.megabytes * 1e6), tally))
    log.info(f"Wrote {path}: {tally.documents} documents, {tally.size / 1e6:.1f} MB.")
    return 0


@dataclass
class _Tally:
    """What was written: documents, and bytes."""

    documents: int = 0
    size: int = 0


def _write(stream: BinaryIO, wanted: int, tally: _Tally) -> None:
    """Writes documents until there are enough bytes."""
    for source, text in corpus_documents():
        line = json.dumps({"text": text, "src": source}, ensure_ascii=False)
        tally.size += stream.write(line.encode() + b"\n")
        tally.documents += 1
        if tally.size >= wanted:
            return
    if tally.size < _LEAST_BYTES:
        raise DataError(
            f"This Python ({sys.prefix}) carries only {tally.size} bytes of source text; {_LEAST_BYTES} are needed. "
            "Use an interpreter with its full standard library, or train on a jsonl file of your own."
        )


def corpus_documents() -> Iterator[tuple[str, str]]:
    """(source, text) of the standard library, then, where that is not enough, of the installed packages."""
    paths = sysconfig.get_paths()
    standard = Path(paths["stdlib"])
    yield from _documents_of(standard, "stdlib")
    for name in ("purelib", "platlib"):
        if name == "purelib" or paths[name] != paths["purelib"]:
            yield from _documents_of(Path(paths[name]), name)


def _documents_of(root: Path, title: str) -> Iterator[tuple[str, str]]:
    for path in _source_files(root):
        try:
            text = path.read_bytes().decode("utf-8")
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
    """Python files below a folder, modules before tests, in an order that depends on their names only."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT_FOLDERS and not name.endswith("data")]
        found.extend(Path(folder, name) for name in names if name.endswith(".py"))
    relative = [(path.relative_to(root).as_posix(), path) for path in found]
    yield from (path for _, path in sorted(relative, key=lambda entry: ("test" in entry[0], entry[0])))


def _docstrings(source: str) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in found if text]


if __name__ == "__main__":
    log.exit_with(main)
