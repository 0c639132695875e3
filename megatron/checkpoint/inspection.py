"""Looks into one checkpoint folder from a single process, for tools: no mesh, nothing collective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.layout import Catalogue, whole
from megatron.checkpoint.manifest import Manifest, read_manifest
from megatron.checkpoint.reader import CheckpointReader, check_files, verify_files
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError
from megatron.parallel.pieces import Kind


def read_record(path: Path) -> dict[str, Any]:
    """The record of one checkpoint folder; reads the manifest only.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    return read_manifest(Path(path)).record


def verify(path: Path) -> Manifest:
    """Reads a whole checkpoint folder and compares every digest.

    Raises:
        DamagedError: something differs from the manifest.
    """
    manifest = read_manifest(Path(path))
    verify_files(Path(path), manifest, Storage())
    return manifest


def read_tensors(
    path: Path,
    names: Sequence[str] | None = None,
    kind: Kind = "weight",
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    storage: Storage | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Builds whole tensors, one at a time, each verified before it is given out.

    Args:
        names: global parameter names; None means all, sorted.
        shapes: the shape wanted of a tensor, where it is not the stored one: adjacent dimensions of one may be merged
            in the other.

    Raises:
        CheckpointError: a tensor is not in the checkpoint, does not have the wanted shape, or is damaged.
    """
    path = Path(path)
    storage = storage or Storage()
    manifest = read_manifest(path, storage)
    check_files(path, manifest, storage)
    catalogue = Catalogue.of(manifest.pieces)
    for name in catalogue.names() if names is None else names:
        stored_shape = catalogue.shape(name)
        if stored_shape is None:
            raise CheckpointError(f"tensor {name} is not in {path}. It holds: {', '.join(catalogue.names()[:20])}.")
        shape = (shapes or {}).get(name, stored_shape)
        built: list[torch.Tensor] = []
        reader = CheckpointReader(path, manifest, [(whole(name, kind, shape), built.append)], storage)
        reader.verify()
        reader.deliver()
        yield name, built[0].reshape(shape)
