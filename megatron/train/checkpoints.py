"""Saves a run: the record of its checkpoints, and the handling of storage failures."""

from __future__ import annotations

from pathlib import Path

from megatron import __version__, log
from megatron.checkpoint import save
from megatron.checkpoint.record import Record
from megatron.data.datasets.build import data_fingerprint
from megatron.engine.state import owned_pieces
from megatron.errors import StorageError
from megatron.tokenizers.record import TokenizerRecord
from megatron.train.run import Run


def save_run(run: Run, *, must_succeed: bool = False) -> None:
    """Saves the run at its current step, unless `--save` is not given or that step has been saved; collective.

    Args:
        run: its `saved_step` and `failed_saves` are updated.
        must_succeed: raise on the first storage failure. Otherwise one failed save is reported and training continues;
            a second consecutive failure is raised.

    Raises:
        StorageError: the file system failed; earlier checkpoints are intact.
    """
    control = run.config.control
    if control.save is None or run.saved_step == run.progress.step:
        return
    pieces = owned_pieces(run.engine, with_optimizer=not control.no_save_optim)
    try:
        save(Path(control.save), run.progress.step, pieces, run_record(run).to_json(), run.mesh, lock=run.lock)
    except StorageError as failure:
        run.failed_saves += 1
        if must_succeed or run.failed_saves > 1:
            raise
        if run.mesh.control.rank == 0:
            log.error(f"{failure} Training continues; the next attempt to save is at the next --save-interval.")
        return
    run.failed_saves = 0
    run.saved_step = run.progress.step


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
    )
