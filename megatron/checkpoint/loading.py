"""Loads a checkpoint: every rank reads what it needs, and all have verified it before a tensor changes on any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.checkpoint.layout import Catalogue
from megatron.checkpoint.manifest import Manifest, read_manifest
from megatron.checkpoint.reader import CheckpointReader, Wanted, check_files
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError
from megatron.parallel.agreement import is_same_on_all, run_on_all
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max

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
