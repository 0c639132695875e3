"""Checkpoints of the older format version, and with index files, for tests that need them small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.checkpoint.catalogue import ITEM_BYTES, KINDS
from megatron.checkpoint.manifest import MANIFEST_NAME, read_manifest
from megatron.checkpoint.manifests import version_2
from megatron.checkpoint.manifests.contents import Manifest
from megatron.checkpoint.manifests.texts import sealed
from megatron.checkpoint.storage import DISK, Storage

FORMS = ("version 2", "indexed", "version 1")


def rewrite(folder: Path, form: str, storage: Storage = DISK) -> None:
    """Gives a checkpoint's manifest another form; its other files stay."""
    manifest = read_manifest(folder, storage)
    texts = {MANIFEST_NAME: version_1_text(manifest)}
    if form != "version 1":
        with pytest.MonkeyPatch.context() as patch:
            if form == "indexed":
                patch.setattr(version_2, "_MOST_ROOT_BYTES", -1)
                patch.setattr(version_2, "_MOST_INDEX_FILES", 2)
            root, indexes = version_2.manifest_texts(
                manifest.step,
                manifest.run,
                manifest.record,
                manifest.chunk_bytes,
                manifest.files,
                manifest.catalogue.runs,
            )
        texts = {**indexes, MANIFEST_NAME: root}
    for name, text in texts.items():
        storage.remove_file(folder / name)
        handle = storage.create(folder / name)
        storage.write(handle, memoryview(text))
        storage.close(handle)


def version_1_text(manifest: Manifest) -> bytes:
    """The text that older programs wrote for such a checkpoint."""
    tensors: dict[tuple[str, tuple[int, ...]], int] = {}
    types, rows = list(ITEM_BYTES), []
    for number in range(len(manifest.files)):
        for piece in manifest.catalogue.pieces_of(number):
            key = piece.key
            tensor = tensors.setdefault((key.name, key.shape), len(tensors))
            kind, dtype = KINDS.index(key.kind), types.index(piece.dtype)
            rows.append([tensor, kind, dtype, key.start, key.stop, key.first, key.last, number, piece.begin_bytes])
    values = {
        "format": "megatron-pieces",
        "format_version": 1,
        "step": manifest.step,
        "run": manifest.run,
        "record": manifest.record,
        "chunk_bytes": manifest.chunk_bytes,
        "files": [[file.name, file.size_bytes, file.sha256, file.chunks] for file in manifest.files],
        "tensors": list(tensors),
        "kinds": KINDS,
        "types": types,
        "pieces": rows,
    }
    return sealed(json.dumps(values).encode()[:-1] + b",\n")
