"""Actions after a save: links, copies in a second folder, deletion of old checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from megatron import log
from megatron.checkpoint import CheckpointLock, read_record
from megatron.checkpoint.publish import link_checkpoint
from megatron.checkpoint.record import Progress, Record
from megatron.checkpoint.retention.copying import copy_checkpoint
from megatron.checkpoint.retention.node_copies import Nodes, copy_to_nodes
from megatron.checkpoint.retention.pruning import Pruner, RetentionRules
from megatron.checkpoint.storage import DISK
from megatron.config import SavingConfig
from megatron.config.flags.paths import is_address
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError, LaunchError, StorageError
from megatron.parallel.mesh import ParallelMesh
from megatron.train.callback import Callback, CallbackSetup


class Retention(Callback):
    """Links, copies and deletes checkpoints according to the flags; failures are warnings.

    Args:
        beat: called while a copy makes progress.
    """

    def __init__(self, saving: SavingConfig, beat: Callable[[], None]) -> None:
        self._secondary = None if saving.save_secondary is None else Path(saving.save_secondary)
        self._pruner: Pruner | None = None
        self._secondary_pruner: Pruner | None = None
        self._nodes: Nodes | None = None
        self._saving = saving
        self._storage = DISK
        self._beat = beat

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        return cls(setup.config.saving, lambda: setup.watch.beat("save"))

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        rules, resumed_step = RetentionRules.of(self._saving), None if record is None else progress.step
        if rules is not None:
            self._pruner = Pruner(rules, self._storage, resumed_step)
            self._secondary_pruner = Pruner(rules, self._storage, resumed_step)

    def after_save(self, path: Path, mesh: ParallelMesh) -> None:
        """Links, copies and prunes; collective over `mesh.control`."""
        if mesh.control.rank == 0:
            self._link(path)
        if self._secondary is not None:
            self._copy(path, self._secondary, mesh)
        if mesh.control.rank == 0 and self._pruner is not None:
            self._pruner.apply(path)

    def _link(self, path: Path) -> None:
        if self._saving.checkpoint_link is None:
            return
        try:
            record = Record.from_json(read_record(path), path)
        except (CheckpointError, StorageError) as failure:
            log.warning(f"no link to {path} (--checkpoint-link), because it cannot be read: {failure}")
            return
        epoch = record.data_plan.epoch_of(record.progress.consumed_samples)
        name = self._saving.link_name(epoch, record.progress.step)
        if name is not None:
            link_checkpoint(path, name, self._storage)

    def _copy(self, path: Path, directory: Path, mesh: ParallelMesh) -> None:
        copy = self._copy_to_nodes if self._saving.save_secondary_per_node else self._copy_whole
        try:
            copy(path, directory, mesh)
        except (CheckpointError, LaunchError, StorageError) as failure:
            if mesh.control.rank == 0:
                later = f" To copy it later: tools/checkpoints.py copy {path.parent} {directory}"
                log.warning(
                    f"{path.name} was not copied to --save-secondary {directory}: {failure}"
                    + ("" if self._saving.save_secondary_per_node else later)
                )

    def _copy_to_nodes(self, path: Path, directory: Path, mesh: ParallelMesh) -> None:
        self._nodes = self._nodes or Nodes.of(mesh)
        copy_to_nodes(path, directory, mesh, self._nodes, storage=self._storage, beat=self._beat)

    def _copy_whole(self, path: Path, directory: Path, mesh: ParallelMesh) -> None:
        """Copies to one folder, which is locked meanwhile."""
        # A store has no lock that ends with its holder; each run has its own prefix there.
        with contextlib.nullcontext() if is_address(directory) else CheckpointLock(directory, mesh):
            copy = copy_checkpoint(
                path, directory, mesh, flag="--save-secondary", replaces=True, storage=self._storage, beat=self._beat
            )
            if mesh.control.rank == 0 and self._secondary_pruner is not None and copy is not None:
                self._secondary_pruner.apply(copy)
