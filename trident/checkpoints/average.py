"""Averages the weights of several checkpoints into a checkpoint without optimizer state."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.lock import CheckpointLock
from megatron.checkpoint.publish import sweep_at_start
from megatron.checkpoint.record import Record
from megatron.checkpoint.recovery import OpenCheckpoint, find
from megatron.checkpoint.retention.copying import point_to_newest
from megatron.checkpoint.saving import write_snapshot
from megatron.checkpoint.snapshot import Snapshot
from megatron.checkpoint.storage import DISK
from megatron.config.resume import architecture_differences
from megatron.errors import CheckpointError
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import PieceKey
from trident.checkpoints.slices import batches


@dataclass(frozen=True)
class WeightedCheckpoint:
    """A checkpoint and its coefficient in the mean; only the ratios of coefficients matter."""

    checkpoint: OpenCheckpoint
    coefficient: float = 1.0


def average(shares: Sequence[WeightedCheckpoint], directory: Path) -> Path:
    """Writes the mean of the weights as a checkpoint in a directory and returns its folder.

    Averages fp32 master weights where stored, sums in float64 and stores float32. The record is copied from the newest
    checkpoint, without optimizer state. Memory is constant.

    Raises:
        LaunchError: a run saves to the directory.
        CheckpointError: the checkpoints hold different networks (names the fields), or the directory holds checkpoints.
        DamagedError: a checkpoint is damaged.
        StorageError: a file cannot be read or written.
    """
    for share in shares[1:]:
        _check_fits(shares[0].checkpoint, share.checkpoint)
    mesh = ParallelMesh.single()
    with CheckpointLock(directory, mesh):
        return _write_mean(shares, directory, mesh)


def _write_mean(shares: Sequence[WeightedCheckpoint], directory: Path, mesh: ParallelMesh) -> Path:
    present = find(directory)
    if present:  # perhaps written by the same command, which was killed before it updated the pointer file
        sweep_at_start(directory, mesh)
        point_to_newest(directory, secrets.token_hex(8), DISK)
        raise CheckpointError(
            f"{directory} already holds checkpoints ({present[0].path.name}), and nothing is overwritten. Use another "
            "folder for --save."
        )
    newest = max((share.checkpoint for share in shares), key=lambda checkpoint: checkpoint.manifest.step)
    record = {**_weights_only(newest.record).to_json(), "averaged": _origin(shares)}
    return write_snapshot(directory, newest.manifest.step, AveragedPieces(tuple(shares)).snapshot(), record, mesh)


@dataclass(frozen=True)
class AveragedPieces:
    """The mean as pieces for the checkpoint writer, computed lazily slice by slice."""

    shares: tuple[WeightedCheckpoint, ...]

    def snapshot(self) -> Snapshot:
        """The keys and values of all pieces, for the checkpoint writer."""
        return Snapshot(tuple((key, "F32") for batch in self._batches() for key in batch), self)

    def __iter__(self) -> Iterator[tuple[PieceKey, torch.Tensor]]:
        total = sum(share.coefficient for share in self.shares)
        for batch in self._batches():
            sums = [torch.zeros(key.numel, dtype=torch.float64) for key in batch]
            for share in self.shares:
                for mean, values in zip(sums, share.checkpoint.read(batch), strict=True):
                    mean.add_(values.double(), alpha=share.coefficient / total)
            for key, mean in zip(batch, sums, strict=True):
                yield key, mean.float()

    def _batches(self) -> Iterator[list[PieceKey]]:
        tensors = self.shares[0].checkpoint.tensors()
        return batches((name, "weight", tensor.shape) for name, tensor in tensors.items())


def _check_fits(first: OpenCheckpoint, other: OpenCheckpoint) -> None:
    changed = [
        f"{field} is {one} and {two}"
        for field, one, two in architecture_differences(first.record.config, other.record.config)
    ]
    if changed:
        raise CheckpointError(
            f"{first.folder} and {other.folder} hold different networks: {'; '.join(changed)}. Only checkpoints of one "
            "network can be averaged."
        )
    one, two = first.record.tokenizer, other.record.tokenizer
    if not one.is_of(two):
        differing = one.differences(two)
        raise CheckpointError(
            f"{first.folder} and {other.folder} were trained with different tokenizers: {one.name} with "
            f"{one.vocab_size} tokens, fingerprint {str(one.fingerprint)[:12]}, and {two.name} with {two.vocab_size}, "
            f"{str(two.fingerprint)[:12]}{f' ({differing})' if differing else ''}. The rows of their embeddings belong "
            "to different tokens."
        )
    ours, theirs = first.tensors(), other.tensors()
    unmatched = sorted(set(ours) ^ set(theirs))
    if unmatched:
        raise CheckpointError(
            f"{first.folder} and {other.folder} hold different tensors: {', '.join(unmatched[:5])} only in one of "
            "them. Only checkpoints of one network can be averaged."
        )


def _weights_only(record: Record) -> Record:
    """Copies a record without its run and its optimizer state."""
    sections = [
        name for name, entries in record.config.items() if isinstance(entries, Mapping) and "no_save_optim" in entries
    ] or ["saving"]
    changed = {name: {**record.config.get(name, {}), "no_save_optim": True} for name in sections}
    config: dict[str, Any] = {**record.config, **changed}
    return dataclasses.replace(
        record,
        config=config,
        optimizer_updates=0,
        loss_scale={},
        run_id="",
        finetuned_from={},
        family=record.first_family,
    )


def _origin(shares: Sequence[WeightedCheckpoint]) -> list[dict[str, Any]]:
    total = sum(share.coefficient for share in shares)
    return [
        {
            "path": str(share.checkpoint.folder),
            "step": share.checkpoint.manifest.step,
            "coefficient": share.coefficient / total,
        }
        for share in shares
    ]
