"""Which checkpoints of a folder are kept; the others are deleted, after a newer one is committed and never before.

What is not certainly a checkpoint of this run is left alone: folders of other programs and runs, links, checkpoints
that are damaged, and checkpoints into which other files were put.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from megatron import log
from megatron.checkpoint.keeping.summaries import ManifestSummaries, ManifestSummary, other_files, steps_in
from megatron.checkpoint.publish import remove_checkpoint, remove_dead_links
from megatron.checkpoint.reader import verify
from megatron.checkpoint.storage import Storage
from megatron.config import SavingConfig
from megatron.errors import CheckpointError, DamagedError, StorageError


@dataclass(frozen=True)
class KeepRules:
    """Which checkpoints of a run are not deleted.

    Attributes:
        last: this many of the newest.
        every: those whose step is a multiple of this; None for no such.
        best: the one with the lowest validation loss, the newest of equal ones.
    """

    last: int
    every: int | None = None
    best: bool = False

    @classmethod
    def of(cls, saving: SavingConfig) -> KeepRules | None:
        """The rules that the flags ask for; None if nothing is to be deleted."""
        return None if saving.keep_last is None else cls(saving.keep_last, saving.keep_every, saving.keep_best)

    def keep_step(self, step: int) -> bool:
        """Whether a checkpoint is kept for its step alone."""
        return self.every is not None and step % self.every == 0

    def superfluous(
        self, checkpoints: Sequence[ManifestSummary], counts: Callable[[ManifestSummary], bool]
    ) -> list[ManifestSummary]:
        """The checkpoints that need not be kept.

        Args:
            checkpoints: newest first.
            counts: whether a checkpoint makes older ones dispensable: one that does not may be deleted itself, but is
                no reason to delete another.
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
class Retention:
    """Deletes what a folder need not keep; for one process, the first of a run or a tool.

    Args:
        resumed_step: the step the run continued from. Newer checkpoints were there already and were passed over when
            it was loaded, so they do not count until the run has saved those steps itself.
    """

    def __init__(self, rules: KeepRules, storage: Storage, resumed_step: int | None = None) -> None:
        self._rules = rules
        self._storage = storage
        self._resumed_step = resumed_step
        self._summaries = ManifestSummaries(storage)
        self._saved_steps: set[int] = set()
        self._warned: set[str] = set()

    def apply(self, newest: Path) -> list[Path]:
        """Deletes what is not kept besides the checkpoint that was just committed, and returns what is gone.

        A failure is a warning.
        """
        try:
            summary = self._summaries.of(newest)
            self._saved_steps.add(summary.step)
            doomed = self.plan(summary)
        except (CheckpointError, StorageError, OSError) as failure:
            log.warning(f"no checkpoint in {newest.parent} is deleted now, because it cannot be examined: {failure}")
            return []
        gone = [summary.path for summary in doomed if self._remove(summary)]
        if gone:
            with contextlib.suppress(OSError):  # the next save sweeps, too
                remove_dead_links(newest.parent, self._storage)
            log.info(f"deleted {', '.join(path.name for path in gone)} in {newest.parent}, which need not be kept")
        return gone

    def plan(self, newest: ManifestSummary) -> list[ManifestSummary]:
        """What would be deleted, newest first; checkpoints of later steps belong to another past and are left alone.

        Raises:
            OSError: the directory cannot be listed.
        """
        checkpoints = [newest]
        counted = 1
        for step, path in steps_in(newest.path.parent, self._storage).items():
            is_kept = counted >= self._rules.last and self._rules.keep_step(step) and not self._rules.best
            if step >= newest.step or is_kept:
                continue
            summary = self._look(path, newest.run_id)
            if summary is not None:
                checkpoints.append(summary)
                counted += self._counts(summary)
        self._warn_without_losses(checkpoints)
        return [summary for summary in self._rules.superfluous(checkpoints, self._counts) if self._may_remove(summary)]

    def newest_in(self, directory: Path, run_id: str) -> ManifestSummary:
        """The newest checkpoint of a folder that is whole: every byte is compared, since others are deleted for it.

        Args:
            run_id: the run that the folder belongs to; empty if it names none.

        Raises:
            CheckpointError: no checkpoint there is whole.
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
                self._warn_once(f"{path} does not count as a checkpoint to keep and is not deleted: {damage}")
                continue
            return summary
        raise CheckpointError(
            f"no checkpoint in {directory} is whole and of its run, so none is deleted. tools/checkpoints.py list and "
            "verify say what is wrong."
        )

    def _counts(self, summary: ManifestSummary) -> bool:
        return self._resumed_step is None or summary.step <= self._resumed_step or summary.step in self._saved_steps

    def _look(self, path: Path, run_id: str) -> ManifestSummary | None:
        """A checkpoint of the same run that is good; None for anything else."""
        try:
            summary = self._summaries.of(path)
        except (CheckpointError, StorageError) as failure:
            self._warn_once(f"{path} does not count as a checkpoint to keep and is not deleted: {failure}")
            return None
        if summary.run_id != run_id:  # an imported model names no run
            self._warn_once(f"{path} is of another run ({summary.run_id or 'it names none'}) and is not deleted")
            return None
        return summary

    def _may_remove(self, summary: ManifestSummary) -> bool:
        others = other_files(summary, self._storage)
        if others:
            self._warn_once(
                f"{summary.path} holds files that are not part of it ({', '.join(others[:3])}): not deleted"
            )
        return not others

    def _remove(self, summary: ManifestSummary) -> bool:
        try:
            remove_checkpoint(summary.path, self._storage)
        except OSError as failure:
            log.warning(f"could not delete {summary.path}: {failure}. It is tried again after the next save.")
            return False
        self._summaries.forget(summary.path)
        return True

    def _warn_without_losses(self, checkpoints: Sequence[ManifestSummary]) -> None:
        if self._rules.best and all(summary.validation_loss is None for summary in checkpoints):
            self._warn_once(
                f"--keep-best keeps no checkpoint in {checkpoints[0].path.parent}: none has a validation loss. It is "
                "that of an evaluation at the step that is saved; let --save-interval be a multiple of --eval-interval."
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text)
