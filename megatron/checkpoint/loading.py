"""Loads a checkpoint: every rank reads what it needs, and all have verified it before a tensor changes on any.

Tools look into one from a single process, without a mesh: `read_record`, `verify`, `read_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.checkpoint.layout import Catalogue, whole
from megatron.checkpoint.manifest import Manifest, read_manifest
from megatron.checkpoint.reader import CheckpointReader, Wanted, check_files, verify_files
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError
from megatron.parallel.agreement import is_same_on_all, run_on_all
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max
from megatron.parallel.pieces import Kind

Check = Callable[[Path, Mapping[str, Any]], None]
Announce = Callable[[str], None]


def load(
    path: Path,
    wanted: Wanted,
    mesh: ParallelMesh,
    *,
    known: Manifest | None = None,
    check: Check | None = None,
    storage: Storage | None = None,
    announce: Announce = log.line,
) -> dict[str, Any]:
    """Reads this rank's wanted pieces from one checkpoint folder and returns its record; collective over the mesh.

    Every rank reads only the chunks that it needs. No `accept` is called on any rank before all ranks have verified all
    bytes they need.

    Args:
        known: a manifest that this rank has parsed before; it is used again if the one on the disk has its digest.
        check: called with the folder and its record before anything else is read; what it raises ends the attempt.
        announce: says what was loaded: on standard output, unless that is for something else.

    Raises:
        DamagedError: some rank found damage (on every rank); an older checkpoint may do.
        CheckpointError: the checkpoint does not hold what is wanted; an older one would not help.
        StorageError: the system refused for a reason that has nothing to do with the checkpoint.
    """
    path = Path(path)
    storage = storage or Storage()
    prepared = run_on_all(mesh, lambda: _prepare(path, wanted, known, check, mesh.control.rank == 0, storage))
    manifest = prepared.manifest
    if not is_same_on_all(mesh, bytes.fromhex(manifest.digest)):
        raise CheckpointError(f"the ranks see different checkpoints at {path}. All nodes must see the same directory.")
    _warn_of_unclaimed(path, manifest, prepared.claimed, mesh)
    run_on_all(mesh, prepared.reader.deliver)
    announce(f"successfully loaded checkpoint from {path.parent} at iteration {manifest.step}")
    return manifest.record


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


@dataclass(frozen=True)
class _Prepared:
    """What a rank has verified: the reader delivers it; `claimed` are the names of the tensors it wants parts of."""

    manifest: Manifest
    reader: CheckpointReader
    claimed: frozenset[str]


def _prepare(
    path: Path,
    wanted: Wanted,
    known: Manifest | None,
    check: Check | None,
    checks_all_files: bool,
    storage: Storage,
) -> _Prepared:
    manifest = read_manifest(path, storage, known)
    if check is not None:
        check(path, manifest.record)
    if checks_all_files:
        check_files(path, manifest, storage)
    listed = list(wanted)
    reader = CheckpointReader(path, manifest, listed, storage)
    reader.verify()
    return _Prepared(manifest, reader, frozenset(key.name for key, _ in listed))


def _warn_of_unclaimed(path: Path, manifest: Manifest, claimed: frozenset[str], mesh: ParallelMesh) -> None:
    """Says which stored tensors no rank wanted: a smaller model than the saved one would otherwise load in silence."""
    names = Catalogue.of(manifest.pieces).names()
    flags = torch.tensor([int(name in claimed) for name in names], dtype=torch.int32)
    left = [name for name, flag in zip(names, all_reduce_max(flags, mesh.control).tolist(), strict=True) if not flag]
    if left and mesh.control.rank == 0:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        log.warning(f"{path} holds tensors that this run's model does not have: {', '.join(left[:5])}{more}")
