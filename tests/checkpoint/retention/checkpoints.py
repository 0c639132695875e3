"""Small checkpoints of runs, and file systems that fail or after which nothing more happens."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from megatron.checkpoint import SaveOptions, load_newest, save
from megatron.checkpoint.saving import AfterCommit
from megatron.checkpoint.storage import Storage
from megatron.parallel.mesh import ParallelMesh
from tests.checkpoint.made.fake_pieces import State, cut_for_ranks, make_state, whole_sink

MESH = ParallelMesh.single()
RUN = "0123456789abcdef"
OTHER_RUN = "fedcba9876543210"


def save_step(
    directory: Path,
    step: int,
    *,
    seed: int | None = None,
    run_id: str = RUN,
    loss: Any = None,
    storage: Storage | None = None,
    after_commit: AfterCommit | None = None,
) -> Path:
    """Saves the random state of a seed, which is the step if not given, as a checkpoint of a run."""
    seed = step if seed is None else seed
    record = {"seed": seed, "run_id": run_id, "validation_loss": loss}
    pieces = cut_for_ranks(_state(seed), 1, seed)[0]
    storage = storage or Unsynced()
    return save(
        directory, step, pieces, record, MESH, SaveOptions(chunk_bytes=1024, storage=storage, after_commit=after_commit)
    )


def loaded_seed(directory: Path) -> int:
    """Loads what recovery takes and checks every value against the seed in its record."""
    sink = whole_sink(_state(0))
    found = load_newest(directory, sink.wanted, MESH)
    assert found is not None
    sink.expected = whole_sink(_state(found.record["seed"])).expected
    sink.check()
    return int(found.record["seed"])


def _state(seed: int) -> State:
    return make_state(kinds=("master",), seed=seed)


def steps(directory: Path) -> list[int]:
    """The steps of the checkpoint folders that have their final name."""
    return sorted(int(path.name[5:]) for path in directory.glob("iter_*"))


def hidden(directory: Path) -> list[str]:
    """Names of what saves, copies and deletions leave behind when they die."""
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


class Unsynced(Storage):
    """Waits for no disk: what a test needs on it is there for every process."""

    def sync(self, handle: int) -> None:
        """Does nothing."""

    def sync_directory(self, path: Path) -> None:
        """Does nothing."""


class Death(BaseException):
    """The process ended here."""


class MortalStorage(Storage):
    """Fails, or dies with all that would follow, at one of its operations that change something."""

    def __init__(self, end_at: int | None = None, *, dies: bool = True, number: int = errno.EIO) -> None:
        self.operations: list[str] = []
        self._end_at = end_at
        self._dies = dies
        self._number = number

    def _step(self, name: str) -> None:
        here = len(self.operations)
        self.operations.append(name)
        if self._end_at is None or here < self._end_at:
            return
        if self._dies:
            raise Death(f"at operation {self._end_at}, {name}")
        if here == self._end_at:
            raise OSError(self._number, os.strerror(self._number))

    def make_directory(self, path: Path) -> None:
        self._step("mkdir")
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._step("create")
        return super().create(path)

    def write(self, handle: int, content: memoryview) -> int:
        self._step("write")
        return super().write(handle, content)

    def sync(self, handle: int) -> None:
        self._step("sync")

    def sync_directory(self, path: Path) -> None:
        self._step("sync directory")

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename")
        super().rename(source, target)

    def remove_file(self, path: Path) -> None:
        self._step("remove file")
        super().remove_file(path)

    def remove_tree(self, path: Path) -> None:
        """Removes file by file, the manifest last."""
        for entry in sorted(path.iterdir(), reverse=True) if path.is_dir() else ():
            self._step("remove")
            entry.unlink()
        self._step("remove")
        shutil.rmtree(path, ignore_errors=True)
