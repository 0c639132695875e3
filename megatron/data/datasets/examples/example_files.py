"""Files of examples: one JSON record per line, or a list of records; compressed or not."""

from __future__ import annotations

import functools
import glob
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

from megatron.data.formats.store_names import is_store_address
from megatron.errors import DataError, printable
from megatron.files.formats import recognized
from megatron.files.plain import open_plain

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".json", ".json.gz")
_LONGEST_LINE_BYTES = 64 << 20
_LARGEST_LIST_BYTES = 1 << 30  # a list is parsed as a whole
_READ_BYTES = 1 << 20


def names_example_files(prefix: str) -> bool:
    """Returns True if a source names example files: by its suffix, unless it configures a document store."""
    return prefix.endswith(SUFFIXES) and not is_store_address(prefix)


def example_files(prefix: str) -> list[str]:
    """Returns the files matching a path or a pattern, sorted by name.

    Raises:
        DataError: no file matches.
    """
    paths = [prefix] if os.path.isfile(prefix) else sorted(filter(os.path.isfile, glob.glob(prefix)))
    if not paths:
        raise DataError(
            f"{prefix}: no such file. Give the path of a file with examples, or a quoted pattern such as "
            "'chat/*.jsonl'."
        )
    return paths


@functools.lru_cache(maxsize=1024)
def content_hash(path: str, size: int, changed_at: int) -> str:
    """Returns the SHA-256 of a file's bytes.

    Args:
        size, changed_at: of the file, in bytes and nanoseconds; part of the cache's key.

    Raises:
        DataError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open_plain(path) as stream:
            while chunk := stream.read(_READ_BYTES):
                digest.update(chunk)
    except OSError as failure:
        raise DataError(f"{path} cannot be read: {failure.strerror}. Check the file.") from None
    return digest.hexdigest()


def files_fingerprint(prefix: str) -> str:
    """Returns the SHA-256 over the contents of the files in order, independent of their location."""
    digest = hashlib.sha256()
    for path in example_files(prefix):
        state = os.stat(path)
        digest.update(content_hash(path, state.st_size, state.st_mtime_ns).encode())
    return digest.hexdigest()


def read_records(path: str, *, with_lists: bool = True) -> Iterator[tuple[int, Any]]:
    """Yields the records of a file, each with its line number or its position in the list, from 1.

    Args:
        with_lists: read files that hold a list, which are parsed as a whole.

    Raises:
        DataError: the file cannot be read, or a line is not JSON.
    """
    try:
        with open_plain(path) as raw:
            stream: Any = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
            yield from _records(stream, path, with_lists)
    except (OSError, EOFError, zlib.error) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise DataError(f"{path} cannot be read: {reason}. Check the file, or download it again.") from None


def _records(stream: Any, path: str, with_lists: bool) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := stream.readline(_LONGEST_LINE_BYTES + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
            if line.lstrip()[:1] == b"[":
                if not with_lists:
                    return
                yield from enumerate(_list_of(line + stream.read(_LARGEST_LIST_BYTES), path), start=1)
                return
        if len(line) > _LONGEST_LINE_BYTES:
            raise DataError(f"{path}:{number}: the line is longer than {_LONGEST_LINE_BYTES:,} bytes. Split it.")
        if not line.isspace() and line:
            yield number, _parsed(line, f"{path}:{number}", "Write one record as JSON on each line")


def _list_of(content: bytes, path: str) -> list[Any]:
    if len(content) > _LARGEST_LIST_BYTES:
        raise DataError(
            f"{path} holds a list of more than {_LARGEST_LIST_BYTES:,} bytes. Write one record per line (.jsonl)."
        )
    records = _parsed(content, path, "Write a list of records, or one record per line")
    return records if isinstance(records, list) else [records]


def _parsed(content: bytes, location: str, advice: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as failure:
        reason = f"byte 0x{content[failure.start]:02x} at {failure.start} is not UTF-8"
    except RecursionError:
        reason = "values are nested too deeply"
    except ValueError as failure:
        reason = printable(str(failure), quoted=False)
    raise DataError(f"{location}: not JSON: {reason}. {recognized(content, as_lines=True) or advice}.")
