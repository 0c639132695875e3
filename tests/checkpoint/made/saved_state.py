"""A small checkpoint of one process, for tests that need one on the disk."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint import SaveOptions, save
from megatron.checkpoint.storage import Storage
from megatron.parallel.mesh import ParallelMesh
from tests.checkpoint.made.fake_pieces import cut_for_ranks, make_state

MESH = ParallelMesh.single()
RECORD = {"progress": {"step": 3, "consumed_samples": 24}, "config": {"lr": 0.1}}


class CountingStorage(Storage):
    """Counts what is read."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def read_into(self, handle: int, target: memoryview, offset_bytes: int) -> int:
        count = super().read_into(handle, target, offset_bytes)
        self.read_bytes += count
        return count


def save_state(directory: Path, step: int = 3, seed: int = 0, chunk_bytes: int = 256) -> Path:
    """Saves the random state of a seed."""
    pieces = cut_for_ranks(make_state(seed=seed), 1, seed)[0]
    return save(directory, step, pieces, RECORD, MESH, SaveOptions(chunk_bytes=chunk_bytes))
