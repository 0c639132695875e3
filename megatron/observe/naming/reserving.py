"""One rank reserves the name of a new run, and all ranks put it into their folders.

Folders on the command line may have `{run}` or `{experiment}` where the name goes.
"""

from __future__ import annotations

import dataclasses
import random
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.config import ControlConfig
from megatron.errors import StorageError
from megatron.observe.naming import experiments, run_names
from megatron.observe.naming.run_names import Choose
from megatron.parallel.agreement import run_on_first
from megatron.parallel.mesh import ParallelMesh

NameForm = Callable[[Choose, time.struct_time], str]

_FORMS: Mapping[str, NameForm] = types.MappingProxyType(
    {run_names.PLACE: run_names.run_name, experiments.PLACE: experiments.experiment_name}
)
_MOST_DRAWS = 1000


def reserve_name(parent: Path, choose: Choose, at: time.struct_time, form: NameForm = run_names.run_name) -> str:
    """Makes a folder of a new name, which no other process can make as well, and returns the name.

    Raises:
        StorageError: the folder cannot be made, or every name that was drawn is taken.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_MOST_DRAWS):
            name = form(choose, at)
            try:
                (parent / name).mkdir()
            except FileExistsError:
                continue
            return name
    except OSError as failure:
        raise StorageError(
            f"a folder for the run cannot be made in {parent}: {failure.strerror}. Choose another (--run-dir)."
        ) from failure
    raise StorageError(
        f"{parent} holds a run of every one of the {_MOST_DRAWS} names that were drawn. Choose another folder, or name "
        "the run (--run-dir)."
    )


def with_run_name(control: ControlConfig, mesh: ParallelMesh) -> ControlConfig:
    """The same with a new run's name where --run-dir has a placeholder; collective over the mesh.

    Raises:
        StorageError: see `reserve_name`.
    """
    place = next((place for place in _FORMS if place in (control.run_dir or "")), None)
    if place is None or control.run_dir is None:
        return control
    parent = Path(control.run_dir.partition(place)[0])
    # Seeded by the operating system: runs that start at the same moment with the same --seed draw different names.
    choose = random.SystemRandom().choice
    name = run_on_first(mesh, lambda: reserve_name(parent, choose, time.localtime(), _FORMS[place]))
    values = {field.name: getattr(control, field.name) for field in dataclasses.fields(control)}
    named: dict[str, Any] = {
        field: value.replace(place, name)
        for field, value in values.items()
        if isinstance(value, str) and place in value
    }
    return dataclasses.replace(control, **named)
