"""Restores a run from a checkpoint: finds it, checks that it fits, and loads its tensors into the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron import log
from megatron.checkpoint import Found, find, folder_of_step, load_newest, newest_record
from megatron.checkpoint.record import Progress, Record
from megatron.config import ControlConfig
from megatron.engine.engine import Engine
from megatron.engine.state import refresh_weights, wanted_pieces
from megatron.errors import CheckpointError
from megatron.parallel.agreement import run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.record import check_same_tokenizer
from megatron.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class SavedRun:
    """The checkpoint that a run continues from: its record and location. Its tensors are not verified yet."""

    record: Record
    found: Found


def find_saved_run(control: ControlConfig, mesh: ParallelMesh) -> SavedRun | None:
    """The checkpoint this run continues from, None for a new run; collective over the mesh.

    Raises:
        CheckpointError: `--load` holds no usable checkpoint although one is required, or `--save` holds another run's
            checkpoints.
    """
    if control.from_scratch:
        return None
    if control.load is None:
        if control.save is not None:
            run_on_first(mesh, lambda: _reject_foreign_save(str(control.save)))
        return None
    found = newest_record(_source(control, mesh), mesh)
    if found is not None:
        return SavedRun(Record.from_json(found.record, found.path), found)
    for flag, is_set in (("--eval-only", control.eval_only), ("--finetune", control.finetune)):
        if is_set:
            raise CheckpointError(
                f"--load {control.load} holds no checkpoint, and {flag} needs the weights of one. Give the folder of "
                "an earlier run's checkpoints."
            )
    if control.exit_on_missing_checkpoint:
        raise CheckpointError(
            f"--load {control.load} holds no checkpoint and --exit-on-missing-checkpoint is set. Give the folder of an "
            "earlier run."
        )
    missing = Path(control.load) / "latest"
    log.info(f"no checkpoint in {control.load} yet: starting at iteration 0 (Unable to find latest file at {missing})")
    return None


def check_tokenizer(control: ControlConfig, record: Record, tokenizer: Tokenizer) -> None:
    """Checks that the tokenizer is the one the checkpoint was trained with.

    Raises:
        CheckpointError: it is not.
    """
    check_same_tokenizer(f"the checkpoint in {control.load} was trained", record.tokenizer, tokenizer, CheckpointError)


def load_tensors(control: ControlConfig, engine: Engine, saved: SavedRun | None) -> tuple[Record | None, Progress]:
    """Loads weights and optimizer state of the newest checkpoint that verifies; collective over the mesh.

    Returns:
        the record of the loaded checkpoint (an older one if `saved` is damaged) and the progress at which training
        starts; None and iteration 0 without a checkpoint.

    Raises:
        CheckpointError: it holds no optimizer state although that is required, does not fit, or has disappeared.
    """
    if saved is None:
        return None, Progress()
    with_optimizer = not (control.finetune or control.no_load_optim)
    if with_optimizer and not saved.record.has_optimizer_state:
        raise CheckpointError(
            f"the checkpoint in {control.load} was saved with --no-save-optim and holds no optimizer state. Resume "
            "with --no-load-optim (the moments start from zero) or with --finetune."
        )
    loaded = load_newest(
        _source(control, engine.mesh),
        lambda: wanted_pieces(engine, with_optimizer=with_optimizer),
        engine.mesh,
        known=saved.found,
    )
    if loaded is None:
        raise CheckpointError(f"the checkpoint in {control.load} disappeared while it was being loaded. Start again.")
    record = Record.from_json(loaded.record, loaded.path)
    refresh_weights(engine, record.optimizer_updates if with_optimizer else None)
    if with_optimizer:
        engine.restore_loss_scale(record.loss_scale)
    if control.finetune:
        log.info(f"finetuning the weights of {loaded.path} from iteration 0")
        return record, Progress()
    progress = record.progress
    log.info(
        f"resumed {loaded.path}: iteration {progress.step}, {progress.consumed_samples} samples, "
        f"{progress.consumed_tokens} tokens consumed"
    )
    return record, progress


def _source(control: ControlConfig, mesh: ParallelMesh) -> Path:
    """The folder to look for checkpoints in: that of --load, or of one step in it; collective over the mesh.

    Raises:
        CheckpointError: there is no checkpoint of the step, or --save holds later ones, from which the next run would
            continue.
    """
    directory, step = Path(str(control.load)), control.load_step
    if step is None:
        return directory

    def chosen() -> str:
        folder = folder_of_step(directory, step)
        later = [candidate.step for candidate in find(Path(control.save))] if control.save else []
        if later and later[0] > step:
            raise CheckpointError(
                f"--ckpt-step {step} is older than the checkpoint of step {later[0]} in --save {control.save}, which "
                "the next run would continue from. Save to another folder."
            )
        return str(folder)

    return Path(run_on_first(mesh, chosen))


def _reject_foreign_save(directory: str) -> None:
    candidates = find(Path(directory))
    if candidates:
        raise CheckpointError(
            f"--save {directory} holds checkpoints already (newest: iteration {candidates[0].step}) and --load is not "
            f"given. Add --load {directory} to continue from there, --from-scratch to overwrite them, or choose "
            f"another "
            "folder."
        )
