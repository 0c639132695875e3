"""What follows a saved checkpoint: its copy in a second folder, and the deletion of those that need not be kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import final

from megatron import log
from megatron.checkpoint import CheckpointLock
from megatron.checkpoint.keeping.copying import copy_checkpoint
from megatron.checkpoint.keeping.retention import KeepRules, Retention
from megatron.checkpoint.storage import Storage
from megatron.config import SavingConfig
from megatron.errors import CheckpointError, LaunchError, StorageError
from megatron.parallel.mesh import ParallelMesh


@final
class Keeping:
    """Copies and deletes checkpoints as the flags of a run say, if they do; called after each commit, on every rank.

    Nothing that fails here harms the checkpoint that was saved: it is a warning.

    Args:
        resumed_step: the step the run continued from; None for a new run.
        beat: called while a copy advances.
    """

    def __init__(self, saving: SavingConfig, resumed_step: int | None, beat: Callable[[], None]) -> None:
        rules, storage = KeepRules.of(saving), Storage()
        self._secondary = None if saving.save_secondary is None else Path(saving.save_secondary)
        self._retention = None if rules is None else Retention(rules, storage, resumed_step)
        self._secondary_retention = None if rules is None else Retention(rules, storage, resumed_step)
        self._storage = storage
        self._beat = beat

    def __call__(self, path: Path, mesh: ParallelMesh) -> None:
        """Handles the checkpoint that was just committed; collective over `mesh.control`."""
        if self._secondary is not None:
            self._copy(path, self._secondary, mesh)
        if mesh.control.rank == 0 and self._retention is not None:
            self._retention.apply(path)

    def _copy(self, path: Path, directory: Path, mesh: ParallelMesh) -> None:
        """Copies, and deletes older copies; meanwhile no tool may clean up the folder."""
        try:
            with CheckpointLock(directory, mesh):
                copy = copy_checkpoint(
                    path,
                    directory,
                    mesh,
                    flag="--save-secondary",
                    replaces=True,
                    storage=self._storage,
                    beat=self._beat,
                )
                if mesh.control.rank == 0 and self._secondary_retention is not None and copy is not None:
                    self._secondary_retention.apply(copy)
        except (CheckpointError, LaunchError, StorageError) as failure:
            if mesh.control.rank == 0:
                log.warning(
                    f"--save-secondary {directory} has no copy of {path.name}: {failure} To copy it later: "
                    f"tools/checkpoints.py copy {path.parent} {directory}"
                )
