"""The text of a manifest and of its parts: read in bounded memory, and nothing else until its digest was compared."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from megatron.checkpoint.checks import LARGEST_BYTES, parse_bounded
from megatron.checkpoint.storage import Storage, opened, read_range, unreadable
from megatron.errors import DamagedError

SEAL_BYTES = len(b'"digest": "') + 64 + len(b'"\n}\n')

_LEAST_FILE_BYTES = 16  # of a checkpoint on the disk, for every byte of memory that its manifest takes beyond the bound
_SEAL = re.compile(rb'"digest": "([0-9a-f]{64})"\n}\n\Z')


def sealed(body: bytes) -> bytes:
    """The text of a JSON object up to its last entry, with the digest of that text as the last entry."""
    return body + b'"digest": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def digest_in(tail: bytes | bytearray) -> str | None:
    """The digest with which a text ends, or None if it ends otherwise."""
    seal = _SEAL.search(tail[-SEAL_BYTES:])
    return None if seal is None else seal.group(1).decode()


def read_whole(storage: Storage, path: Path) -> bytearray:
    """The bytes of a manifest, whose content is not checked yet.

    Raises:
        DamagedError: it is missing, or too large for the files next to it.
        StorageError: the system refused for a reason that has nothing to do with the file.
    """
    try:
        with opened(storage, path) as (handle, size_bytes):
            check_size(storage, path, size_bytes)
            content = bytearray(size_bytes)
            read_range(storage, handle, memoryview(content), 0)
            return content
    except OSError as failure:
        raise unreadable(path, failure) from failure


def check_size(storage: Storage, path: Path, size_bytes: int) -> None:
    """Checks that a manifest is not larger than the files next to it give a reason for.

    Raises:
        DamagedError: it is.
    """
    if 2 * size_bytes > LARGEST_BYTES:
        largest_bytes = (LARGEST_BYTES + _more_bytes(storage, path)) // 2
        if size_bytes > largest_bytes:
            raise DamagedError(
                f"{path} has {size_bytes} bytes; a manifest has at most {largest_bytes} for files of "
                "these sizes. Use another checkpoint."
            )


def parsed(path: Path, text: bytes | bytearray, storage: Storage) -> dict[str, Any]:
    """The JSON object in a text.

    Raises:
        DamagedError: it holds none, or one that would take more memory than files of these sizes need.
    """
    try:
        values = parse_bounded(text, lambda: _more_bytes(storage, path))
        if not isinstance(values, dict):
            raise ValueError("it holds no object")
    except ValueError as failure:
        raise DamagedError(f"{path} is not a manifest: {failure}. Use another checkpoint.") from failure
    return values


def _more_bytes(storage: Storage, path: Path) -> int:
    """The memory that a manifest may take beyond the usual: a checkpoint that fills a large disk has many pieces."""
    try:
        return storage.taken_bytes(path.parent) // _LEAST_FILE_BYTES
    except OSError as failure:
        raise unreadable(path, failure) from failure
