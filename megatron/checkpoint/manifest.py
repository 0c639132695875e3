"""The manifest: what a checkpoint folder holds, with a digest of every 16 MiB, of every file, and of itself.

`manifest.json` is JSON text whose last entry is the SHA-256 of all bytes before that entry, so no byte of it can change
unnoticed. A digest tells nothing about who wrote the text, so nothing in it is trusted before it was checked: what it
takes in memory is bounded, names are plain, numbers are in range, the pieces of a file are contiguous up to its end,
and pieces make up whole tensors. `manifests` has the format.
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
        known: a manifest parsed before; returned instead of parsing the text again if it has the text's digest,
            and no index files.

    Raises:
        DamagedError: it is missing, was changed, or contains impossible values.
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
            f"{folder} has no {MANIFEST_NAME}: it is not complete, or another program wrote it (then convert it first)."
        )
    manifest = _read_or_refuse(path, storage, known)
    if not isinstance(manifest, Manifest):
        raise manifest
    number = folder_step(folder.name)
    if number is not None and number != manifest.step:
        raise DamagedError(
            f"{path} is of step {manifest.step}, not of its folder's step {number}. Use another checkpoint."
        )
    return manifest


def read_record(folder: Path) -> dict[str, Any]:
    """The record of one checkpoint folder.

    Raises:
        as `read_manifest`.
    """
    return read_manifest(folder).record


def _read_or_refuse(path: Path, storage: Storage, known: Manifest | None) -> Manifest | MegatronError:
    """The manifest, or why it is refused: as a value, since a traceback would keep the text of a huge one alive."""
    try:
        return _read(path, storage, known)
    except (CheckpointError, StorageError) as failure:
        return type(failure)(str(failure))


def _read(path: Path, storage: Storage, known: Manifest | None) -> Manifest:
    text = read_whole(storage, path)
    digest = digest_in(text)
    if digest is None:
        raise DamagedError(f"{path} is damaged: it does not end with its digest. Use another checkpoint.")
    if hashlib.sha256(memoryview(text)[:-SEAL_BYTES]).hexdigest() != digest:
        raise DamagedError(f"{path} is damaged: its content does not have the digest {digest}. Use another checkpoint.")
    if known is not None and known.digest == digest and not known.indexes:  # those would be read in its own folder
        return known
    return _checked(path, text, digest, storage)


def stored_digest(folder: Path, storage: Storage) -> str | None:
    """The digest at the end of a manifest, by which one that was read before is recognized; its text is not compared.

    None without a manifest that ends so.
    """
    try:
        return digest_in(read_tail(storage, folder / MANIFEST_NAME, SEAL_BYTES))
    except OSError:
        return None


def folder_step(name: str) -> int | None:
    """The step in a checkpoint folder's name, or None when the name is not one."""
    match = _FOLDER_NAME.match(name)
    return int(match.group(1) or match.group(2)) if match else None


def folder_name(step: int) -> str:
    """The name of a checkpoint folder."""
    return f"iter_{step:07d}"


def file_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"pieces_{rank:05d}.safetensors"


def _checked(path: Path, text: bytes | bytearray, digest: str, storage: Storage) -> Manifest:
    """Parses a manifest whose digest is right.

    Raises:
        DamagedError, CheckpointError: as `read_manifest`.
    """
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
