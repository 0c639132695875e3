"""One rank reserves the name of a new run, and all ranks put it into their folders."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.config import ControlConfig
from megatron.errors import StorageError
from megatron.observe.naming import experiments
from megatron.parallel.agreement import run_on_first
from megatron.parallel.mesh import ParallelMesh

_MOST_DRAWS = 1000


def with_run_name(control: ControlConfig, mesh: ParallelMesh) -> ControlConfig:
    """The same with a new run's name where its folders have a placeholder; collective over the mesh.

    The first rank makes the folder, so that no run that starts at the same moment can have the same name.

    Raises:
        StorageError: the folder cannot be made.
    """
    before, place, _ = (control.run_dir or "").partition(experiments.PLACE)
    if not place:
        return control
    # Seeded by the operating system: runs that start at the same moment with the same --seed draw different names.
    choose = random.SystemRandom().choice
    name = run_on_first(
        mesh, lambda: reserve_name(Path(before), lambda: experiments.experiment_name(choose, time.localtime()))
    )
    texts = {field.name: getattr(control, field.name) for field in dataclasses.fields(control)}
    named: dict[str, Any] = {key: text.replace(place, name) for key, text in texts.items() if isinstance(text, str)}
    return dataclasses.replace(control, **named)


def reserve_name(parent: Path, draw: Callable[[], str]) -> str:
    """Makes a folder whose name was drawn, and returns the name.

    Raises:
        StorageError: the folder cannot be made, or every name that was drawn is taken.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_MOST_DRAWS):
            name = draw()
            try:
                (parent / name).mkdir()
            except FileExistsError:
                continue
            return name
    except OSError as failure:
        raise StorageError(
            f"a folder for the run cannot be made in {parent}: {failure.strerror}. Choose another (--run-dir)."
        ) from failure
    raise StorageError(f"{parent} holds a run of every name that was drawn. Choose another folder (--run-dir).")
