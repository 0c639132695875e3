"""Saves a run, synchronously or in the background: the record of its checkpoints, and the handling of failed saves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron import __version__, log
from megatron.checkpoint import CheckpointLock, SaveOptions
from megatron.checkpoint import save as save_checkpoint
from megatron.checkpoint.background_writer import BackgroundWriter, memory_problem
from megatron.checkpoint.record import Record
from megatron.config import RunConfig
from megatron.data.build import data_fingerprint
from megatron.engine.engine import Engine
from megatron.engine.state import owned_bytes, owned_pieces
from megatron.errors import ConfigError, StorageError
from megatron.host_memory import available_memory_bytes
from megatron.observe.styles.choice import style_named
from megatron.parallel.agreement import run_on_all
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_gather_json
from megatron.parallel.pieces import PieceKey
from megatron.tokenizers.record import TokenizerRecord
from megatron.train.callback import Callback
from megatron.train.callbacks.evaluator import Evaluator
from megatron.train.callbacks.step_reports import StepReports
from megatron.train.restarts.identity import RunIdentity
from megatron.train.run import Run
from megatron.train.steps import TrainedStep
from megatron.train.stop import StopVerdict

# Entries of callbacks that are not under `parts`, for compatibility with older versions.
_RECORD_FIELDS_OF_CALLBACKS = ("recent", "passed_batches")


def open_writer(config: RunConfig, engine: Engine, lock: CheckpointLock | None) -> BackgroundWriter | None:
    """The writer for background saves; None for a run that saves synchronously or not at all; collective.

    If a copy of the state does not fit into host memory, a run without an explicit --async-save saves synchronously.

    Raises:
        ConfigError: --async-save is given, and a copy of the state does not fit into host memory.
    """
    saving = config.saving
    if saving.save is None or config.evaluation.eval_only or not saving.async_save:
        return None
    options = SaveOptions(lock=lock, lines=style_named(config.report.log_style, config.program).SAVE_LINES)
    writer = BackgroundWriter(Path(saving.save), engine.mesh, options)
    size_bytes = owned_bytes(engine, with_optimizer=not saving.no_save_optim)
    problem = memory_problem(size_bytes, engine.mesh, available_memory_bytes())
    if problem is None:
        problem = _reserve(writer, size_bytes, engine.mesh)
    if problem is not None:
        if config.was_given("saving.async_save"):
            raise ConfigError(
                f"--async-save: {problem}. Use --no-async-save, fewer ranks per machine, or machines with more memory."
            )
        if engine.mesh.control.rank == 0:
            log.warning(f"{problem}: saves will be synchronous, as with --no-async-save.")
        return None
    engine.before_update(writer.wait_for_copy)
    return writer


def _reserve(writer: BackgroundWriter, size_bytes: int, mesh: ParallelMesh) -> str | None:
    """Allocates host memory for this rank's copies; returns the failure of any rank; collective."""
    try:
        writer.reserve(size_bytes)
        refused = ""
    except MemoryError as failure:
        refused = str(failure)
    failures: list[str] = all_gather_json(refused, mesh.control)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(failures) if text), None)


class Saving(Callback):
    """Saves a run when due and after its last step.

    Args:
        identity: the run that the checkpoints belong to.
        followers: callbacks notified of each save, which add to the record.
        reports: flushed before a save.
        evaluator: provides the validation loss of the saved step.
        lock: of the folder.
        writer: for background saves; None for synchronous saves.
        saved_step: step of the last committed checkpoint.

    Attributes:
        failed: consecutive failures of the file system.
        failure: the error that ends background saves; may be set on this rank before others.
    """

    def __init__(
        self,
        identity: RunIdentity,
        followers: Callback,
        reports: StepReports,
        evaluator: Evaluator,
        lock: CheckpointLock | None = None,
        writer: BackgroundWriter | None = None,
        saved_step: int | None = None,
    ) -> None:
        self.identity = identity
        self.writer = writer
        self.saved_step = saved_step
        self.failed = 0
        self.failure: Exception | None = None
        self._followers = followers
        self._reports = reports
        self._evaluator = evaluator
        self._lock = lock
        self._is_due = False

    def opened(self, run: Run) -> None:
        writer = self.writer
        if writer is not None:
            writer.after_commit, writer.beat = self._followers.after_save, lambda: run.watch.beat("save")
            run.watch.has_background_save = lambda: writer.is_writing

    def after_step(self, run: Run, step: TrainedStep) -> None:
        saving = run.config.saving
        self._is_due |= run.is_due(saving.save_interval) or (step.ends_epoch and saving.save_each_epoch)
        # Not after a bad step: if the weights are the cause, the last good checkpoint must stay the newest.
        if self._is_due and not run.engine.gate.in_bad_streak:
            self._is_due = False
            self._reports.flush(run)
            self.save(run)
        self.note_outcome(run)
        if self.failure is not None:
            run.stopping.request(StopVerdict.FAILED_SAVE)

    def trained(self, run: Run) -> None:
        """Saves the last step.

        Raises:
            MegatronError: it cannot be saved, or background saves have failed.
        """
        if run.stopping.verdict is StopVerdict.FAILED_SAVE:
            run_on_all(run.mesh, lambda: self._wait_for_writer(run))
        self.save(run, must_succeed=True)

    def save(self, run: Run, *, must_succeed: bool = False) -> None:
        """Saves the current step, unless --save is not given or the step was saved already; collective.

        A background save only starts here, after the previous one has ended.

        Args:
            must_succeed: save synchronously, and raise on a storage failure. Otherwise training continues until
                --max-failed-saves consecutive saves have failed.

        Raises:
            StorageError: the file system failed; earlier checkpoints are intact.
            MegatronError: a callback refuses, or an earlier background save failed for another reason.
        """
        run.watch.enter("save", run.progress.step)
        if run.config.saving.save is None:
            return
        log.set_activity(f"saving step {run.progress.step}")
        writer = self.writer
        if writer is None:
            if self.saved_step != run.progress.step:
                self._save_at_once(run, must_succeed=must_succeed)
            return
        started_at, waited_seconds = time.monotonic(), writer.stall_seconds
        record = run_on_all(run.mesh, lambda: self._record_to_save(run, must_succeed=must_succeed))
        if record is not None:
            self._followers.before_save(run)
            writer.start_save(run.progress.step, _pieces(run), record)
        elif self.saved_step != run.progress.step:
            self._save_at_once(run, must_succeed=True)
        writer.stall_seconds = waited_seconds + time.monotonic() - started_at

    def note_outcome(self, run: Run) -> None:
        """Processes the outcome of a background save that ended since the last call; not collective.

        A storage failure is reported; after too many, or any other failure, the run must stop, see `Stopping.decide`.
        """
        outcome = None if self.writer is None else self.writer.take_outcome()
        if outcome is None:
            return
        log.debug(
            f"the save of iteration {outcome.step} took {outcome.seconds:.2f} s in the background; saves have stalled "
            f"training for {self.writer.stall_seconds if self.writer else 0.0:.3f} s so far"
        )
        if outcome.failure is None:
            self.saved_step, self.failed = outcome.step, 0
        elif isinstance(outcome.failure, StorageError):
            self.failure = self._noted(run, outcome.step, outcome.failure)
        else:
            self.failure = outcome.failure

    def _record_to_save(self, run: Run, *, must_succeed: bool) -> dict[str, Any] | None:
        """Waits for the save in progress; returns the record for a background save, None if none is needed.

        Raises:
            MegatronError: background saves have failed, and the next attempt cannot succeed.
        """
        self._wait_for_writer(run, may_retry=must_succeed)
        if must_succeed or self.saved_step == run.progress.step:
            return None
        return self.record(run).to_json()

    def _wait_for_writer(self, run: Run, *, may_retry: bool = False) -> None:
        if self.writer is not None:
            self.writer.wait()
        self.note_outcome(run)
        if self.failure is not None and not (may_retry and isinstance(self.failure, StorageError)):
            raise self.failure

    def _save_at_once(self, run: Run, *, must_succeed: bool) -> None:
        directory, record = Path(str(run.config.saving.save)), self.record(run).to_json()
        self._followers.before_save(run)
        try:
            options = SaveOptions(
                self._lock, self._followers.after_save, lambda: run.watch.beat("save"), run.report.style.SAVE_LINES
            )
            save_checkpoint(directory, run.progress.step, _pieces(run), record, run.mesh, options)
        except StorageError as failure:
            last = self._noted(run, run.progress.step, failure, must_succeed=must_succeed)
            if last is not None:
                raise last from failure
            return
        self.failed = 0
        self.saved_step = run.progress.step

    def _noted(self, run: Run, step: int, failure: StorageError, *, must_succeed: bool = False) -> StorageError | None:
        """Records a failed save; returns the error that ends the run, or None if training continues.

        The decision is the same on all ranks, since a save fails on all of them.
        """
        self.failed += 1
        run.report.failed_save(run.progress, step, str(failure), self.failed)
        self._followers.failed_save(run, step, str(failure))
        saving = run.config.saving
        if must_succeed:
            return failure
        remaining = saving.tolerated_failures - self.failed
        if remaining < 0 and saving.exit_on_failed_save:
            return StorageError(f"{failure} The run ends because of --exit-on-failed-save.")
        if remaining < 0:
            return StorageError(
                f"{failure} The run ends because {self.failed} consecutive saves failed (--max-failed-saves "
                f"{saving.max_failed_saves})."
            )
        if run.mesh.control.rank == 0:
            log.warning(
                f"the checkpoint of iteration {step} was not saved: {failure} Training continues; the next attempt is "
                f"at the next --save-interval. The run ends if {remaining + 1} more consecutive saves fail "
                f"(--max-failed-saves {saving.max_failed_saves})."
            )
        return None

    def record(self, run: Run) -> Record:
        """The state of a run without its tensors."""
        identity, state = self.identity, dict(self._followers.state(run))
        fields = {name: state.pop(name) for name in _RECORD_FIELDS_OF_CALLBACKS if name in state}
        return Record(
            progress=run.progress,
            optimizer_updates=run.engine.update_count,
            loss_scale=run.engine.view.loss_scale_state(),
            config=run.config.to_json(),
            data_plan=run.data.plan,
            data=data_fingerprint(run.config.data) if run.mesh.control.rank == 0 else {},
            tokenizer=TokenizerRecord.of(run.data.tokenizer),
            program_version=__version__,
            run_id=identity.run_id,
            finetuned_from=identity.finetuned_from,
            forked_from=identity.forked_from,
            validation_loss=self._evaluator.validation_loss(run.progress.step),
            began_at=run.engine.freezing.began_at,
            averaged_from=run.engine.freezing.averaged_from,
            averaging_weight=run.engine.averaging_weight,
            parts=state,
            **fields,
        )


def _pieces(run: Run) -> Iterator[tuple[PieceKey, torch.Tensor]]:
    return owned_pieces(run.engine, with_optimizer=not run.config.saving.no_save_optim)
