"""The text of a manifest and of its index files, read in bounded memory; not parsed before its digest is verified."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from megatron.checkpoint.checks import LARGEST_BYTES, parse_bounded
from megatron.checkpoint.storage import Storage, opened, read_range, unreadable
from megatron.errors import DamagedError

SEAL_BYTES = len(b'"digest": "') + 64 + len(b'"\n}\n')

_LEAST_FILE_BYTES = 16  # on disk, for every byte of memory that the manifest takes beyond the bound
_SEAL = re.compile(rb'"digest": "([0-9a-f]{64})"\n}\n\Z')


def sealed(body: bytes) -> bytes:
    """Appends the digest of a JSON text as its last entry."""
    return body + b'"digest": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def digest_in(tail: bytes | bytearray) -> str | None:
    """The digest at the end of a text; None if there is none."""
    seal = _SEAL.search(tail[-SEAL_BYTES:])
    return None if seal is None else seal.group(1).decode()


def read_whole(storage: Storage, path: Path) -> bytearray:
    """The unverified bytes of a manifest.

    Raises:
        DamagedError: it is missing, or too large for the files next to it.
        StorageError: the system refused to read it, for a reason unrelated to the file.
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
    """Checks that a manifest is not too large for the files next to it.

    Raises:
        DamagedError: it is.
    """
    if 2 * size_bytes > LARGEST_BYTES:
        largest_bytes = (LARGEST_BYTES + _more_bytes(storage, path)) // 2
        if size_bytes > largest_bytes:
            raise DamagedError(
                f"{path} has {size_bytes} bytes; a manifest for files of these sizes has at most {largest_bytes}. "
                "Use another checkpoint."
            )


def parsed(path: Path, text: bytes | bytearray, storage: Storage) -> dict[str, Any]:
    """The JSON object in a text.

    Raises:
        DamagedError: there is none, or it would take more memory than files of these sizes need.
    """
    try:
        values = parse_bounded(text, lambda: _more_bytes(storage, path))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as failure:
        raise DamagedError(f"{path} is not a manifest: {failure}. Use another checkpoint.") from failure
    return values


def _more_bytes(storage: Storage, path: Path) -> int:
    """Memory that a manifest may take beyond the usual bound: large checkpoints have many pieces."""
    try:
        return storage.taken_bytes(path.parent) // _LEAST_FILE_BYTES
    except OSError as failure:
        raise unreadable(path, failure) from failure
