"""What flags do with the paths they are given, and therefore what a path may be.

A flag says so where it is declared (`flag(path=PathUse.SMALL_FILE)`). Every command line and every file of flags is
checked against it before anything is opened. A path that does not exist yet is left to the code that opens it, which
knows what is missing.
"""

from __future__ import annotations

import enum
import os
import re
import stat
from collections.abc import Iterator
from pathlib import PurePath

from megatron.files.plain import MOST_SMALL_BYTES, is_shell_pipe, kind_of


class PathUse(enum.Enum):
    """What a flag does with a path."""

    SMALL_FILE = "reads a plain file at once: settings, a vocabulary, a list of hosts"
    FILE = "reads a plain file of any size"
    STREAM = "reads a file sequentially; a shell pipe, <(command), works too"
    CORPUS = "reads files sequentially, all files of a folder, or shell pipes"
    FILE_OR_FOLDER = "reads a file, or a folder of files"
    PREFIX = "reads the pair of token files with this prefix, or Parquet files"
    FOLDER = "reads or makes a folder"
    NEW_FILE = "writes a file"
    NEW_STREAM = "writes sequentially; /dev/null and shell pipes, >(command), work too"
    NEW_PREFIX = "writes files with this prefix"


_ADVICE = {
    PathUse.SMALL_FILE: "Give the path of a plain file.",
    PathUse.FILE: "Give the path of a plain file.",
    PathUse.STREAM: "Give a plain file, or the output of a command as <(command).",
    PathUse.CORPUS: "Give plain files, the output of a command as <(command), or - for standard input.",
    PathUse.FILE_OR_FOLDER: "Give the path of a plain file or of a folder.",
    PathUse.PREFIX: "Give the prefix of plain files.",
    PathUse.FOLDER: "Give the path of a folder.",
    PathUse.NEW_FILE: "Give the path of a plain file or a new one.",
    PathUse.NEW_STREAM: "Give the path of a plain file or a new one, /dev/null, or a command as >(command).",
    PathUse.NEW_PREFIX: "Give the beginning of new paths.",
}
_ONLY_FILES = (PathUse.SMALL_FILE, PathUse.FILE, PathUse.STREAM, PathUse.NEW_FILE, PathUse.NEW_STREAM)
_WRITTEN = (PathUse.NEW_FILE, PathUse.NEW_STREAM, PathUse.NEW_PREFIX)
_STREAMS = (PathUse.STREAM, PathUse.CORPUS, PathUse.NEW_STREAM)
_DESCRIPTORS = ("/dev/std", "/dev/fd/")
_SUFFIXES = (".idx", ".bin")


def is_address(path: PurePath | str) -> bool:
    """Whether a path names a place in an object store, such as s3://bucket/run; `Path` takes one of the slashes."""
    return re.match(r"[A-Za-z][\w+.-]*:/", str(path)) is not None


def address_problems(option: str, folder: str | None) -> Iterator[str]:
    """Refuses an address where a folder is expected: it would be taken as the name of a local folder."""
    if folder is not None and is_address(folder):
        yield (
            f"{option} {folder} is an address, and a folder is needed. Mount the storage and give the path of the "
            "folder there."
        )


def path_problems(option: str, use: PathUse, value: str) -> Iterator[str]:
    """One sentence for every path that cannot be used as the flag needs it.

    Args:
        option: the flag as it was written, or the entry of a file.
        value: the path; of token files it may be a group of weights and prefixes.
    """
    if use is not PathUse.PREFIX:
        yield from _problem(option, use, value)
        return
    for word in dict.fromkeys([value, *re.split(r"[\s,]+", value)]):
        yield from _problem(option, use, word)
        for suffix in _SUFFIXES:
            yield from _problem(option, PathUse.FILE, word + suffix)


def _problem(option: str, use: PathUse, path: str) -> Iterator[str]:
    try:
        if not path or not os.path.lexists(path):
            return
        wrong = _wrong(use, path)
    except (OSError, ValueError) as failure:  # ValueError: a path that no file can have
        wrong = None if isinstance(failure, ValueError) else f"cannot be examined: {failure.strerror}"
    if wrong is not None:
        yield f"{option} {path} {wrong}. {_ADVICE[use]}"


def _wrong(use: PathUse, path: str) -> str | None:
    if not os.path.exists(path) and os.path.islink(path):
        return None if use in _WRITTEN and not _is_loop(path) else _wrong_link(path)
    state = os.stat(path)
    mode = state.st_mode
    if stat.S_ISREG(mode):
        return _wrong_file(use, path, state.st_size)
    if use in _STREAMS and is_shell_pipe(path, mode):
        return None
    if use is PathUse.NEW_STREAM and (path.startswith(_DESCRIPTORS) or os.path.realpath(path) == os.devnull):
        return None
    if stat.S_ISDIR(mode):
        if use in _ONLY_FILES:
            return "is a folder"
        return None if use in _WRITTEN or os.access(path, os.R_OK) else "may not be read by this user"
    return f"is {kind_of(mode)}"


def _is_loop(path: str) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _wrong_link(path: str) -> str:
    if _is_loop(path):
        return f"is a link to {os.readlink(path)} that points back to itself"
    return f"is a link to {os.readlink(path)}, where there is nothing"


def _wrong_file(use: PathUse, path: str, size: int) -> str | None:
    if use in _WRITTEN:
        return None
    if not os.access(path, os.R_OK):
        return "may not be read by this user"
    if use is not PathUse.SMALL_FILE:
        return None
    if size == 0:
        return "is empty"
    return f"holds {size:,} bytes; such a file may hold {MOST_SMALL_BYTES:,}" if size > MOST_SMALL_BYTES else None


def prefix_problems(flag: str, prefix: str, suffix: str, inputs: tuple[str, ...] = ()) -> Iterator[str]:
    """Refuses a prefix that ends with a slash: the outputs would be named by their suffixes alone.

    Args:
        suffix: of an output, such as `_text_document.bin`.
        inputs: the tool's inputs; a name is proposed after the first.
    """
    if not prefix.endswith(("/", os.sep)):
        return
    first = next(iter(inputs), "")
    stem = "" if "://" in first else PurePath(first).name.partition(".")[0]
    name = stem if stem.isidentifier() else "corpus"
    yield (
        f"{flag} {prefix} names a folder and no files: they would be called {prefix}{suffix}. Add how their names "
        f"begin, for example {flag} {prefix}{name}."
    )
