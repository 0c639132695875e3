"""Other files that flags name: tasks that are evaluated, checkpoints to start from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron import log
from megatron.config.run import RunRequest
from megatron.config.sections.control import ControlConfig
from megatron.errors import CheckpointError, ConfigError, MegatronError


def file_failures(request: RunRequest) -> Iterator[MegatronError]:
    """What is missing of the files that flags name.

    Only rank 0 looks for checkpoints, as it does later: other nodes may not see them.
    """
    tasks = request.control.eval_tasks
    if tasks is not None and not os.path.isfile(tasks):
        yield ConfigError(f"--eval-tasks {tasks} is not a file. Give the path of a YAML or JSON file of tasks.")
    if not log.is_first_rank():
        return
    if request.saving.save_secondary is None:
        yield from _load_failures(request.control)
    how = request.distillation
    is_needed = how.is_on and how.kd_iters is None and not request.control.eval_only  # it may be over
    if is_needed and how.load_teacher is not None:
        flag = "--kd" if how.kd else "--mos"
        yield from _checkpoint_failures("--load-teacher", how.load_teacher, flag, "the teacher's run")


def _load_failures(control: ControlConfig) -> Iterator[MegatronError]:
    """A checkpoint that a run cannot do without; others may be missing."""
    needed = {
        f"--ckpt-step {control.load_step}": control.load_step is not None,
        "--eval-only": control.eval_only,
        "--finetune": control.finetune,
        "--exit-on-missing-checkpoint": control.exit_on_missing_checkpoint,
    }
    flag = next((name for name, is_given in needed.items() if is_given), None)
    if control.load is None or flag is None or control.from_scratch:
        return
    yield from _checkpoint_failures("--load", control.load, flag, "an earlier run")


def _checkpoint_failures(flag: str, path: str, needing: str, owner: str) -> Iterator[CheckpointError]:
    """Why a folder holds no checkpoint, without a look into those that it may hold.

    Args:
        needing: the flag that cannot do without one.
        owner: whose checkpoints are meant.
    """
    folder = Path(path)
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        there = next(parent for parent in folder.absolute().parents if os.path.isdir(parent))
        yield CheckpointError(
            f"{flag} {path} does not exist, and {needing} needs a checkpoint from it; the nearest folder that "
            f"exists is {there}. Give the folder of the checkpoints of {owner}."
        )
    except OSError as failure:
        yield CheckpointError(
            f"{flag} {path} cannot be listed: {failure.strerror}, and {needing} needs a checkpoint from it. Give "
            "a folder of checkpoints that this user can read."
        )
    else:
        if not names:
            yield CheckpointError(
                f"{flag} {path} holds no checkpoint, it is empty, and {needing} needs one. Give the folder of the "
                f"checkpoints of {owner}."
            )
