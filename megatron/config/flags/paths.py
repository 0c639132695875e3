"""Checks of paths on the command line by their use, which a flag declares: `flag(path=PathUse.SMALL_FILE)`.

Paths are checked before anything is opened. A path that does not exist is left to the code that opens it.
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
    """The use of a path by a flag."""

    SMALL_FILE = "reads a regular file at once: settings, a vocabulary, a list of hosts"
    FILE = "reads a regular file of any size"
    STREAM = "reads a file sequentially; a shell pipe, <(command), works too"
    CORPUS = "reads files sequentially, all files of a folder, or shell pipes"
    FILE_OR_FOLDER = "reads a file, or a folder of files"
    PREFIX = "reads the pair of token files with this prefix, or Parquet files"
    FOLDER = "reads or creates a folder"
    NEW_FILE = "writes a file"
    NEW_STREAM = "writes sequentially; /dev/null and shell pipes, >(command), work too"
    NEW_PREFIX = "writes files with this prefix"


_ADVICE = {
    PathUse.SMALL_FILE: "Give the path of a regular file.",
    PathUse.FILE: "Give the path of a regular file.",
    PathUse.STREAM: "Give a regular file, or the output of a command as <(command).",
    PathUse.CORPUS: "Give regular files, the output of a command as <(command), or - for standard input.",
    PathUse.FILE_OR_FOLDER: "Give the path of a regular file or of a folder.",
    PathUse.PREFIX: "Give the prefix of regular files.",
    PathUse.FOLDER: "Give the path of a folder.",
    PathUse.NEW_FILE: "Give the path of a regular file or a new one.",
    PathUse.NEW_STREAM: "Give the path of a regular file or a new one, /dev/null, or a command as >(command).",
    PathUse.NEW_PREFIX: "Give the prefix of new files.",
}
_ONLY_FILES = (PathUse.SMALL_FILE, PathUse.FILE, PathUse.STREAM, PathUse.NEW_FILE, PathUse.NEW_STREAM)
_WRITTEN = (PathUse.NEW_FILE, PathUse.NEW_STREAM, PathUse.NEW_PREFIX)
_STREAMS = (PathUse.STREAM, PathUse.CORPUS, PathUse.NEW_STREAM)
_DESCRIPTORS = ("/dev/std", "/dev/fd/")
_SUFFIXES = (".idx", ".bin")


def is_address(path: PurePath | str) -> bool:
    """Returns True for an address such as s3://bucket/run, also with the single slash that `Path` leaves."""
    return re.match(r"[A-Za-z][\w+.-]*:/", str(path)) is not None


def address_problems(option: str, folder: str | None) -> Iterator[str]:
    """Refuses an address where a folder is expected: it would become the name of a local folder."""
    if folder is not None and is_address(folder):
        yield (
            f"{option} {folder} is an address, but must be a folder. Mount the storage and give the path of the folder."
        )


def path_problems(option: str, use: PathUse, value: str) -> Iterator[str]:
    """Yields a sentence for every path that is unsuitable for its use.

    Args:
        option: the flag as it was written, or the entry of a file.
        value: the path; for token files possibly a group of weights and prefixes.
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
    except (OSError, ValueError) as failure:  # ValueError: not a valid path
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
        return None if use in _WRITTEN or os.access(path, os.R_OK) else "is not readable by this user"
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
        return f"is a symbolic link loop (to {os.readlink(path)})"
    return f"is a dangling symbolic link to {os.readlink(path)}"


def _wrong_file(use: PathUse, path: str, size: int) -> str | None:
    if use in _WRITTEN:
        return None
    if not os.access(path, os.R_OK):
        return "is not readable by this user"
    if use is not PathUse.SMALL_FILE:
        return None
    if size == 0:
        return "is empty"
    return f"has {size:,} bytes; the limit is {MOST_SMALL_BYTES:,}" if size > MOST_SMALL_BYTES else None


def prefix_problems(flag: str, prefix: str, suffix: str, inputs: tuple[str, ...] = ()) -> Iterator[str]:
    """Refuses a prefix that ends with a slash: the output names would be their suffixes alone.

    Args:
        suffix: suffix of an output, such as `_text_document.bin`.
        inputs: the tool's inputs; the first gives the proposed name.
    """
    if not prefix.endswith(("/", os.sep)):
        return
    first = next(iter(inputs), "")
    stem = "" if "://" in first else PurePath(first).name.partition(".")[0]
    name = stem if stem.isidentifier() else "corpus"
    yield (
        f"{flag} {prefix} is a folder, not a prefix: files would be named {prefix}{suffix}. Add a name, for example "
        f"{flag} {prefix}{name}."
    )
