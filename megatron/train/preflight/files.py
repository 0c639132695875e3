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
    if log.is_first_rank() and request.saving.save_secondary is None:
        yield from _load_failures(request.control)
    teacher = request.distillation.load_teacher
    if log.is_first_rank() and teacher is not None:
        yield from _folder_failures("--load-teacher", teacher, "--load-teacher")


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
    yield from _folder_failures("--load", control.load, flag)


def _folder_failures(name: str, folder: str, needed_by: str) -> Iterator[MegatronError]:
    """What keeps a folder from holding a checkpoint.

    Args:
        name: the flag that gives the folder.
        needed_by: the flag that needs a checkpoint from it.
    """
    needs = f"{needed_by} needs a checkpoint from it" if needed_by != name else "it must hold a checkpoint"
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        there = next(parent for parent in Path(folder).absolute().parents if os.path.isdir(parent))
        yield CheckpointError(
            f"{name} {folder} does not exist, and {needs}; the nearest folder that exists is {there}. Give the folder "
            "of an earlier run's checkpoints."
        )
    except OSError as failure:
        yield CheckpointError(
            f"{name} {folder} cannot be listed: {failure.strerror}, and {needs}. Give a folder of checkpoints that this "
            "user can read."
        )
    else:
        if not names:
            yield CheckpointError(
                f"{name} {folder} holds no checkpoint, it is empty, and {needs}. Give the folder of an earlier run's "
                "checkpoints."
            )
