"""From a checkpoint back into a run: which one, whether it fits, and its tensors into the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint import find, load_newest, newest_record
from megatron.config import ControlConfig
from megatron.engine.engine import Engine
from megatron.engine.state import refresh_weights, wanted_pieces
from megatron.errors import CheckpointError
from megatron.parallel.agreement import run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.record import TokenizerRecord, check_same_tokenizer
from megatron.tokenizers.tokenizer import Tokenizer
from megatron.train.progress import Progress

Record = Mapping[str, Any]


def find_record(control: ControlConfig, mesh: ParallelMesh) -> Record | None:
    """The record of the checkpoint this run goes on from, None for a fresh start; collective over the mesh.

    Raises:
        CheckpointError: `--load` holds nothing usable where something must be, or `--save` holds another run's
            checkpoints.
    """
    if control.from_scratch:
        return None
    if control.load is None:
        if control.save is not None:
            run_on_first(mesh, lambda: _refuse_foreign_save(str(control.save)))
        return None
    found = newest_record(Path(control.load), mesh)
    if found is not None:
        return found[0]
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
    """Checks that ids mean the same words as when the checkpoint was trained.

    Raises:
        CheckpointError: they do not.
    """
    trained_with = TokenizerRecord.from_json(record["tokenizer"])
    check_same_tokenizer(f"the checkpoint in {control.load} was trained", trained_with, tokenizer, CheckpointError)


def load_tensors(control: ControlConfig, engine: Engine, record: Record | None) -> tuple[Record | None, Progress]:
    """Loads weights and optimizer state of the newest good checkpoint; returns its record and where training stands."""
    if record is None:
        return None, Progress()
    with_optimizer = not (control.finetune or control.no_load_optim)
    if with_optimizer and record["config"]["control"]["no_save_optim"]:
        raise CheckpointError(
            f"the checkpoint in {control.load} was saved with --no-save-optim and holds no optimizer state. Resume "
            "with --no-load-optim (the moments start from zero) or with --finetune."
        )
    loaded = load_newest(
        Path(str(control.load)), lambda: wanted_pieces(engine, with_optimizer=with_optimizer), engine.mesh
    )
    if loaded is None:
        raise CheckpointError(f"the checkpoint in {control.load} disappeared while it was being loaded. Start again.")
    found, path = loaded
    refresh_weights(engine, found["optimizer_updates"] if with_optimizer else None)
    if with_optimizer:
        engine.restore_loss_scale(found["loss_scale"])
    if control.finetune:
        log.info(f"finetuning the weights of {path} from iteration 0")
        return found, Progress()
    progress = Progress.from_json(found["progress"])
    log.info(
        f"resumed {path}: iteration {progress.step}, {progress.consumed_samples} samples, "
        f"{progress.consumed_tokens} tokens consumed"
    )
    return found, progress


def _refuse_foreign_save(directory: str) -> None:
    candidates = find(Path(directory))
    if candidates:
        raise CheckpointError(
            f"--save {directory} holds checkpoints already (newest: iteration {candidates[0].step}) and --load is not "
            f"given. Add --load {directory} to go on from there, --from-scratch to overwrite them, or choose another "
            "folder."
        )
