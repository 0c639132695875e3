"""Saves a run, at once or in the background: the record of its checkpoints, and the handling of failed saves."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron import __version__, log
from megatron.checkpoint import CheckpointLock, save
from megatron.checkpoint.background.host_memory import available_memory_bytes, memory_problem
from megatron.checkpoint.background.writer import BackgroundWriter
from megatron.checkpoint.record import Record
from megatron.config import ControlConfig, SavingConfig
from megatron.data.datasets.build import data_fingerprint
from megatron.engine.engine import Engine
from megatron.engine.state import owned_bytes, owned_pieces
from megatron.errors import ConfigError, StorageError
from megatron.observe.styles.choice import style_named
from megatron.parallel.agreement import run_on_all
from megatron.parallel.pieces import PieceKey
from megatron.tokenizers.record import TokenizerRecord
from megatron.train.numerics import check_before_save
from megatron.train.run import Run


def open_writer(
    control: ControlConfig,
    saving: SavingConfig,
    engine: Engine,
    lock: CheckpointLock | None,
    *,
    is_required: bool = False,
) -> BackgroundWriter | None:
    """What saves a run in the background; None for a run that saves at once, or not at all; collective.

    Args:
        is_required: whether the user asked for it. Otherwise a run saves at once where memory is short.

    Raises:
        ConfigError: it is required, and a copy of the state does not fit into host memory.
    """
    if control.save is None or control.eval_only or not saving.async_save:
        return None
    size_bytes = owned_bytes(engine, with_optimizer=not control.no_save_optim)
    problem = memory_problem(size_bytes, engine.mesh, available_memory_bytes())
    if problem is not None:
        if is_required:
            raise ConfigError(
                f"--async-save: {problem}. Give --no-async-save, start fewer ranks on a machine, or use machines with "
                "more memory."
            )
        if engine.mesh.control.rank == 0:
            log.warning(f"{problem}: each save will hold up training until it is written, as with --no-async-save.")
        return None
    lines = style_named(control.log_style).SAVE_LINES
    writer = BackgroundWriter(Path(control.save), engine.mesh, lock=lock, lines=lines)
    writer.reserve(size_bytes)
    engine.before_update(writer.wait_for_copy)
    return writer


def save_run(run: Run, *, must_succeed: bool = False) -> None:
    """Saves the run at its current step, unless `--save` is not given or that step has been saved; collective.

    A save in the background only begins here, after the one before it has ended.

    Args:
        run: its `saved_step`, `failed_saves` and `save_failure` are updated.
        must_succeed: save at once, and raise on the first storage failure. Otherwise one failed save is reported and
            training continues; a second consecutive failure is raised.

    Raises:
        StorageError: the file system failed; earlier checkpoints are intact.
        NumericsError: see `check_before_save`.
        MegatronError: an earlier save in the background failed for another reason.
    """
    if run.config.control.save is None:
        return
    if run.writer is None:
        if run.saved_step != run.progress.step:
            _save_at_once(run, must_succeed=must_succeed)
        return
    began_at, waited_seconds = time.monotonic(), run.writer.stall_seconds
    record = run_on_all(run.mesh, lambda: _record_to_save(run, must_succeed=must_succeed))
    if record is not None:
        check_before_save(run)
        run.writer.begin(run.progress.step, _pieces(run), record)
    elif run.saved_step != run.progress.step:
        _save_at_once(run, must_succeed=True)
    run.writer.stall_seconds = waited_seconds + time.monotonic() - began_at


def hear_of_save(run: Run) -> None:
    """Notes how the save in the background ended, if it has ended since the last call; not collective.

    The first storage failure is reported, as a warning; after any other the run must stop, see `Run.should_stop`.
    """
    outcome = None if run.writer is None else run.writer.take_outcome()
    if outcome is None:
        return
    log.debug(
        f"the save of iteration {outcome.step} took {outcome.seconds:.2f} s in the background; saves have held up "
        f"training for {run.writer.stall_seconds if run.writer else 0.0:.3f} s so far"
    )
    if outcome.failure is None:
        run.saved_step, run.failed_saves = outcome.step, 0
    elif isinstance(outcome.failure, StorageError) and run.failed_saves == 0:
        _report_failure(run, outcome.failure)
    else:
        run.save_failure = outcome.failure


def raise_failed_save(run: Run) -> None:
    """Raises what made saving in the background impossible, on all ranks; collective.

    Raises:
        MegatronError: as the save did.
    """
    run_on_all(run.mesh, lambda: _wait_for_writer(run))


def run_record(run: Run) -> Record:
    """The state of a run without its tensors."""
    return Record(
        progress=run.progress,
        optimizer_updates=run.engine.update_count,
        loss_scale=run.engine.loss_scale_state,
        config=run.config.to_json(),
        data_plan=run.plan,
        data=data_fingerprint(run.config.data) if run.mesh.control.rank == 0 else {},
        tokenizer=TokenizerRecord.of(run.tokenizer),
        program_version=__version__,
        run_id=run.identity.run_id,
        finetuned_from=run.identity.finetuned_from,
        passed_batches=run.passed_batches,
        recent=run.engine.gate.to_json(),
        validation_loss=_validation_loss(run),
        began_at=run.engine.freezing.began_at,
    )


def _validation_loss(run: Run) -> float | None:
    """The validation loss at the present step; None if it was not evaluated there, or is not finite."""
    step, loss = run.validation or (None, math.nan)
    return loss if step == run.progress.step and math.isfinite(loss) else None


def _record_to_save(run: Run, *, must_succeed: bool) -> dict[str, Any] | None:
    """Waits for the save that is being written; then makes the record of the next one, unless that is to be made at
    once, or there is none to make.

    Raises:
        MegatronError: saving in the background has failed, and not for a reason that the next attempt may overcome.
    """
    _wait_for_writer(run, may_try_again=must_succeed)
    if must_succeed or run.writer is None or run.saved_step == run.progress.step:
        return None
    return run_record(run).to_json()


def _wait_for_writer(run: Run, *, may_try_again: bool = False) -> None:
    if run.writer is not None:
        run.writer.wait()
    hear_of_save(run)
    if run.save_failure is not None and not (may_try_again and isinstance(run.save_failure, StorageError)):
        raise run.save_failure


def _save_at_once(run: Run, *, must_succeed: bool) -> None:
    directory, record = Path(str(run.config.control.save)), run_record(run).to_json()
    check_before_save(run)
    try:
        save(
            directory,
            run.progress.step,
            _pieces(run),
            record,
            run.mesh,
            lock=run.lock,
            after_commit=run.after_commit,
            beat=run.watch.beat,
            lines=run.report.style.SAVE_LINES,
        )
    except StorageError as failure:
        if must_succeed or run.failed_saves > 0:
            raise
        _report_failure(run, failure)
        return
    run.failed_saves = 0
    run.saved_step = run.progress.step


def _report_failure(run: Run, failure: StorageError) -> None:
    run.failed_saves += 1
    if run.mesh.control.rank == 0:
        log.error(f"{failure} Training continues; the next attempt to save is at the next --save-interval.")


def _pieces(run: Run) -> Iterator[tuple[PieceKey, torch.Tensor]]:
    return owned_pieces(run.engine, with_optimizer=not run.config.control.no_save_optim)
