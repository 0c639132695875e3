"""Other files that flags name: tasks that are evaluated, checkpoints to start from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron import log
from megatron.config.run import RunRequest
from megatron.config.running.loading import LoadingConfig
from megatron.errors import CheckpointError, ConfigError, MegatronError


def file_failures(request: RunRequest) -> Iterator[MegatronError]:
    """What is missing of the files that flags name.

    Only rank 0 looks for checkpoints, as it does later: other nodes may not see them.
    """
    tasks = request.evaluation.eval_tasks
    if tasks is not None and not os.path.isfile(tasks):
        yield ConfigError(f"--eval-tasks {tasks} is not a file. Give the path of a YAML or JSON file of tasks.")
    if not log.is_first_rank():
        return
    if request.saving.save_secondary is None:
        yield from _load_failures(request.loading, is_evaluation=request.evaluation.eval_only)
    how = request.distillation
    is_needed = how.is_on and how.kd_iters is None and not request.evaluation.eval_only  # it may be over
    if is_needed and how.load_teacher is not None:
        reason = f"{'--kd' if how.kd else '--mos'} needs the weights of one"
        yield from _folder_failures("--load-teacher", how.load_teacher, reason, "the teacher's run")


def _load_failures(loading: LoadingConfig, *, is_evaluation: bool) -> Iterator[MegatronError]:
    """A checkpoint that a run cannot do without; others may be missing."""
    needed = {
        f"--ckpt-step {loading.load_step} is one of its steps": loading.load_step is not None,
        "--eval-only needs the weights of one": is_evaluation,
        "--finetune needs the weights of one": loading.finetune,
        "--exit-on-missing-checkpoint is set": loading.exit_on_missing_checkpoint,
    }
    reason = next((name for name, is_given in needed.items() if is_given), None)
    if loading.load is None or reason is None or loading.from_scratch:
        return
    yield from _folder_failures("--load", loading.load, reason, "an earlier run")


def _folder_failures(name: str, folder: str, reason: str, owner: str) -> Iterator[CheckpointError]:
    """What keeps a folder from holding a checkpoint, without a look into those that it may hold.

    Args:
        name: the flag that gives the folder.
        reason: why it has to hold one.
        owner: whose checkpoints are meant.
    """
    try:
        why = "it is empty" if not os.listdir(folder) else ""
    except FileNotFoundError:
        there = next(parent for parent in Path(folder).absolute().parents if os.path.isdir(parent))
        why = f"it does not exist, the nearest folder that does is {there}"
    except OSError as failure:
        why = f"it cannot be listed ({failure.strerror})"
    if why:
        yield CheckpointError(
            f"{name} {folder} holds no checkpoint and {reason}: {why}. Give the folder of the checkpoints of {owner}."
        )
