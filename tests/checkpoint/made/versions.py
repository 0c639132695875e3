"""Manifests in other forms: with index files though they are small, and with a digest of any text."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from megatron.checkpoint.manifest import MANIFEST_NAME, read_manifest
from megatron.checkpoint.manifests import writing
from megatron.checkpoint.storage import DISK, Storage

FORMS = ("version 2", "indexed")


def sealed(body: bytes) -> bytes:
    """A manifest whose digest matches.

    Args:
        body: the text before the digest, which ends with a comma and a line end.
    """
    return body + b'"digest": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def rewrite(folder: Path, form: str, storage: Storage = DISK) -> None:
    """Gives a checkpoint's manifest another form; its other files stay."""
    manifest = read_manifest(folder, storage)
    with pytest.MonkeyPatch.context() as patch:
        if form == "indexed":
            patch.setattr(writing, "_MOST_ROOT_BYTES", -1)
            patch.setattr(writing, "_MOST_INDEX_FILES", 2)
        root, indexes = writing.manifest_texts(
            manifest.step,
            manifest.run,
            manifest.record,
            manifest.chunk_bytes,
            manifest.files,
            manifest.catalogue.runs,
        )
    for name, text in {**indexes, MANIFEST_NAME: root}.items():
        storage.remove_file(folder / name)
        handle = storage.create(folder / name)
        storage.write(handle, memoryview(text))
        storage.close(handle)
