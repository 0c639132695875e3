"""Deletes old checkpoints, only after a newer one is committed.

Anything that may not be a checkpoint of this run is left alone: folders of other programs and runs, links, damaged
checkpoints, and checkpoints that contain other files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from megatron import log
from megatron.checkpoint.publish import remove_checkpoint, remove_dead_links
from megatron.checkpoint.reader import verify
from megatron.checkpoint.retention.summaries import ManifestSummaries, ManifestSummary, other_files, steps_in
from megatron.checkpoint.storage import Storage
from megatron.config import SavingConfig
from megatron.errors import CheckpointError, DamagedError, StorageError


@dataclass(frozen=True)
class RetentionRules:
    """The checkpoints of a run to keep.

    Attributes:
        last: number of newest checkpoints.
        every: keep each checkpoint whose step is a multiple of this; None to disable.
        best: keep the one with the lowest validation loss; of equal ones, the newest.
    """

    last: int
    every: int | None = None
    best: bool = False

    @classmethod
    def of(cls, saving: SavingConfig) -> RetentionRules | None:
        """The rules set by the flags; None if nothing is to be deleted."""
        return None if saving.keep_last is None else cls(saving.keep_last, saving.keep_every, saving.keep_best)

    def keep_step(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def expired(
        self, checkpoints: Sequence[ManifestSummary], counts: Callable[[ManifestSummary], bool]
    ) -> list[ManifestSummary]:
        """The checkpoints to delete.

        Args:
            checkpoints: newest first.
            counts: true for a checkpoint that can replace older ones; any other may be deleted itself, but does not
                cause another to be deleted.
        """
        good = [summary for summary in checkpoints if counts(summary)]
        kept = {summary.step for summary in good[: self.last]}
        rated = [(summary.validation_loss, -summary.step) for summary in good if summary.validation_loss is not None]
        if self.best and rated:
            kept.add(-min(rated)[1])
        if len(good) < self.last:
            return []
        return [summary for summary in checkpoints if summary.step not in kept and not self.keep_step(summary.step)]


@final
class Pruner:
    """Deletes expired checkpoints of a folder; used by one process, rank 0 or a tool.

    Args:
        resumed_step: the step the run resumed from. Newer checkpoints were skipped when it was loaded, so they do not
            count until the run has saved those steps itself.
    """

    def __init__(self, rules: RetentionRules, storage: Storage, resumed_step: int | None = None) -> None:
        self._rules = rules
        self._storage = storage
        self._resumed_step = resumed_step
        self._summaries = ManifestSummaries(storage)
        self._saved_steps: set[int] = set()
        self._warned: set[str] = set()

    def apply(self, newest: Path) -> list[Path]:
        """Deletes what expired when `newest` was committed and returns the deleted folders; a failure is a warning."""
        try:
            summary = self._summaries.of(newest)
            self._saved_steps.add(summary.step)
            expired = self.plan(summary)
        except (CheckpointError, StorageError, OSError) as failure:
            log.warning(f"no checkpoint in {newest.parent} is deleted now: {failure}")
            return []
        deleted = [summary.path for summary in expired if self._remove(summary)]
        if deleted:
            with contextlib.suppress(OSError):  # the next save sweeps, too
                remove_dead_links(newest.parent, self._storage)
            log.info(f"deleted expired checkpoints in {newest.parent}: {', '.join(path.name for path in deleted)}")
        return deleted

    def plan(self, newest: ManifestSummary) -> list[ManifestSummary]:
        """The checkpoints to delete, newest first.

        Raises:
            OSError: the directory cannot be listed.
        """
        checkpoints = [newest]
        counted = 1
        for step, path in steps_in(newest.path.parent, self._storage).items():
            is_kept = counted >= self._rules.last and self._rules.keep_step(step) and not self._rules.best
            if step >= newest.step or is_kept:  # later steps are from before the run went back to an older one
                continue
            summary = self._look(path, newest.run_id)
            if summary is not None:
                checkpoints.append(summary)
                counted += self._counts(summary)
        self._warn_without_losses(checkpoints)
        return [summary for summary in self._rules.expired(checkpoints, self._counts) if self._may_remove(summary)]

    def newest_in(self, directory: Path, run_id: str) -> ManifestSummary:
        """The newest complete checkpoint of a folder. Verifies every byte, since older checkpoints are deleted for it.

        Args:
            run_id: the run that the folder belongs to; empty if unknown.

        Raises:
            CheckpointError: no checkpoint there is complete.
            StorageError: the folder or a file cannot be read.
        """
        try:
            folders = steps_in(directory, self._storage)
        except OSError as failure:
            raise StorageError(
                f"cannot list {directory}: {failure.strerror or failure}. Nothing is deleted."
            ) from failure
        for path in folders.values():
            summary = self._look(path, run_id)
            if summary is None:
                continue
            try:
                verify(path, self._storage)
            except DamagedError as damage:
                self._warn_once(f"{path} does not count towards --keep-last and is not deleted: {damage}")
                continue
            return summary
        raise CheckpointError(
            f"no complete checkpoint of this run in {directory}, so none is deleted. To find the cause: "
            "tools/checkpoints.py list, tools/checkpoints.py verify."
        )

    def _counts(self, summary: ManifestSummary) -> bool:
        return self._resumed_step is None or summary.step <= self._resumed_step or summary.step in self._saved_steps

    def _look(self, path: Path, run_id: str) -> ManifestSummary | None:
        """A valid checkpoint of the same run; None for anything else."""
        try:
            summary = self._summaries.of(path)
        except (CheckpointError, StorageError) as failure:
            self._warn_once(f"{path} does not count towards --keep-last and is not deleted: {failure}")
            return None
        if summary.run_id != run_id:  # empty for an imported model
            self._warn_once(f"{path} belongs to another run ({summary.run_id or 'no run id'}) and is not deleted")
            return None
        return summary

    def _may_remove(self, summary: ManifestSummary) -> bool:
        others = other_files(summary, self._storage)
        if others:
            self._warn_once(
                f"{summary.path} is not deleted: it contains files that are not part of it ({', '.join(others[:3])})"
            )
        return not others

    def _remove(self, summary: ManifestSummary) -> bool:
        try:
            remove_checkpoint(summary.path, self._storage)
        except OSError as failure:
            log.warning(f"could not delete {summary.path}: {failure}. Deletion is retried after the next save.")
            return False
        self._summaries.forget(summary.path)
        return True

    def _warn_without_losses(self, checkpoints: Sequence[ManifestSummary]) -> None:
        if self._rules.best and all(summary.validation_loss is None for summary in checkpoints):
            self._warn_once(
                f"--keep-best keeps no checkpoint in {checkpoints[0].path.parent}: none has a validation loss, which "
                "an evaluation at the saved step provides. Make --save-interval a multiple of --eval-interval."
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text)
