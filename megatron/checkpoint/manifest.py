"""The manifest: the contents of a checkpoint folder, with a digest of every 16 MiB, of every file, and of itself.

`manifest.json` is JSON whose last entry is the SHA-256 of all bytes before it, so that no change goes unnoticed. A
digest does not prove who wrote the text, so everything in it is validated first: memory is bounded, names are plain,
numbers are in range, the pieces of a file are contiguous up to its end, and pieces cover whole tensors. For the format
see `manifests`.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from megatron.checkpoint.manifests.contents import Manifest
from megatron.checkpoint.manifests.reading import read_values
from megatron.checkpoint.manifests.texts import SEAL_BYTES, digest_in, parsed, read_whole
from megatron.checkpoint.manifests.writing import FORMAT, FORMAT_VERSION
from megatron.checkpoint.storage import DISK, Storage, read_tail, unreadable
from megatron.errors import CheckpointError, DamagedError, MegatronError, StorageError, printable

MANIFEST_NAME = "manifest.json"

_FOLDER_NAME = re.compile(r"(?:iter_([0-9]{7,18})|\.old-iter_([0-9]{7,18})-[0-9a-f]+)\Z")


def read_manifest(folder: Path, storage: Storage = DISK, known: Manifest | None = None) -> Manifest:
    """Reads and checks the manifest of one checkpoint folder; tensor files are not opened.

    Args:
        known: a manifest parsed earlier; returned if it has the same digest and no index files.

    Raises:
        DamagedError: it is missing, was modified, or contains invalid values.
        CheckpointError: it was written in another format version.
        StorageError: the system refused for a reason that has nothing to do with the file.
    """
    path = folder / MANIFEST_NAME
    try:
        is_incomplete = storage.exists(folder) and not storage.exists(path)
    except OSError as failure:
        raise unreadable(path, failure) from failure
    if is_incomplete:
        raise DamagedError(
            f"{folder} has no {MANIFEST_NAME}: it is incomplete, or another program wrote it (then convert it first)."
        )
    manifest = _read_or_refuse(path, storage, known)
    if not isinstance(manifest, Manifest):
        raise manifest
    number = folder_step(folder.name)
    if number is not None and number != manifest.step:
        raise DamagedError(
            f"{path} is for step {manifest.step}, but its folder is for step {number}. Use another checkpoint."
        )
    return manifest


def read_record(folder: Path) -> dict[str, Any]:
    """The record of one checkpoint folder.

    Raises:
        as `read_manifest`.
    """
    return read_manifest(folder).record


def _read_or_refuse(path: Path, storage: Storage, known: Manifest | None) -> Manifest | MegatronError:
    try:
        return _read(path, storage, known)
    except (CheckpointError, StorageError) as failure:
        return type(failure)(str(failure))  # a traceback would keep the text of a huge manifest in memory


def _read(path: Path, storage: Storage, known: Manifest | None) -> Manifest:
    text = read_whole(storage, path)
    digest = digest_in(text)
    if digest is None:
        raise DamagedError(f"{path} is damaged: it does not end with its digest. Use another checkpoint.")
    if hashlib.sha256(memoryview(text)[:-SEAL_BYTES]).hexdigest() != digest:
        raise DamagedError(f"{path} is damaged: its content does not match digest {digest}. Use another checkpoint.")
    if known is not None and known.digest == digest and not known.indexes:  # index files are read from its own folder
        return known
    return _checked(path, text, digest, storage)


def stored_digest(folder: Path, storage: Storage) -> str | None:
    """The digest at the end of a manifest, without verifying it; None if there is none."""
    try:
        return digest_in(read_tail(storage, folder / MANIFEST_NAME, SEAL_BYTES))
    except OSError:
        return None


def folder_step(name: str) -> int | None:
    """The step in the name of a checkpoint folder; None for any other name."""
    match = _FOLDER_NAME.match(name)
    return int(match.group(1) or match.group(2)) if match else None


def folder_name(step: int) -> str:
    return f"iter_{step:07d}"


def file_name(rank: int) -> str:
    """The name of the file written by a rank."""
    return f"pieces_{rank:05d}.safetensors"


def _checked(path: Path, text: bytes | bytearray, digest: str, storage: Storage) -> Manifest:
    """Parses a manifest whose digest was verified."""
    values = parsed(path, text, storage)
    if values.get("format") != FORMAT:
        shown = printable(values.get("format"))
        raise CheckpointError(f"{path} has format {shown}, not {FORMAT!r}: another program wrote it.")
    version = values.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {printable(version)}; this program reads {FORMAT_VERSION}. "
            "Read it with the program version that wrote it."
        )
    return read_values(path, values, digest, storage)
