"""Reads the tensors of a checkpoint in slices of bounded size, whatever layout wrote it and however large they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.catalogue import ITEM_BYTES
from megatron.checkpoint.layout import whole
from megatron.checkpoint.manifests.contents import Manifest
from megatron.checkpoint.reader import read_pieces
from megatron.checkpoint.record import Record
from megatron.checkpoint.recovery import newest_record
from megatron.errors import CheckpointError
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import Kind, PieceKey

SLICE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint.

    Args:
        kinds: what is stored of it, with the element types as safetensors names them.
    """

    name: str
    shape: tuple[int, ...]
    kinds: Mapping[Kind, str]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def weight_kind(self) -> Kind:
        """The kind that holds its weights; the first of all if it has none."""
        return next((kind for kind in self.kinds if kind in ("weight", "master")), next(iter(self.kinds)))


@dataclass(frozen=True)
class OpenCheckpoint:
    """One checkpoint folder whose manifest and file sizes are good; its tensors are verified when they are read."""

    folder: Path
    manifest: Manifest
    record: Record

    @classmethod
    def newest(cls, path: Path) -> OpenCheckpoint:
        """The newest checkpoint in a folder, or the one that the folder is.

        Raises:
            CheckpointError: there is none, or all are damaged.
        """
        newest = newest_record(path, ParallelMesh.single())
        if newest is None or newest.manifest is None:
            raise CheckpointError(f"there is no checkpoint in {path}. Give a folder to which a run saved checkpoints.")
        return cls(newest.path, newest.manifest, Record.from_json(newest.record, newest.path))

    def tensors(self) -> dict[str, CheckpointTensor]:
        """All tensors by name, in the order of the files."""
        catalogue = self.manifest.catalogue
        kinds: dict[str, dict[Kind, str]] = {}
        for run in catalogue.runs:
            kinds.setdefault(run.key.name, {})[run.key.kind] = run.dtype
        return {name: CheckpointTensor(name, catalogue.shape(name) or (), stored) for name, stored in kinds.items()}

    def read(self, keys: Sequence[PieceKey]) -> list[torch.Tensor]:
        """The values of pieces, verified but not necessarily finite; all of them are in memory at once.

        Shapes: flat, `[numel]` each, in the stored element type.

        Raises:
            CheckpointError: something is not stored, or has another shape.
            DamagedError: the bytes are not those that were written.
        """
        return read_pieces(self.folder, self.manifest, keys, finite=False)


def batches(tensors: Iterable[tuple[str, Kind, tuple[int, ...]]]) -> Iterator[list[PieceKey]]:
    """Flat ranges that make up tensors (name, kind, shape), in order, in lists that may be in memory at once.

    A range has at most `SLICE_BYTES` in float32, and so has a list together, so that small tensors are read at once.
    """
    most = max(1, SLICE_BYTES // ITEM_BYTES["F32"])
    batch: list[PieceKey] = []
    filled = 0
    for tensor in itertools.starmap(whole, tensors):
        for first in range(0, tensor.numel, most):
            key = tensor.narrowed(first, min(first + most, tensor.numel))
            if batch and filled + key.numel > most:
                yield batch
                batch, filled = [], 0
            batch.append(key)
            filled += key.numel
    if batch:
        yield batch
