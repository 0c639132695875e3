"""Checks that a new run's name is its own, and that all folders of the run get it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.config import ControlConfig
from megatron.errors import StorageError
from megatron.observe.naming.reserving import reserve_name, with_run_name
from megatron.parallel.mesh import ParallelMesh

FORM = r"bert_pretrain\.\d{4}(\.\d\d){5}\.[0-9a-f]{8}"


def test_all_folders_of_a_run_get_its_name(tmp_path: Path) -> None:
    parent = f"{tmp_path}/runs/{{experiment}}"
    asked = ControlConfig(run_dir=parent, save=f"{parent}/checkpoints", save_interval=2, tensorboard_dir=f"{parent}/tb")
    control = with_run_name(asked, ParallelMesh.single())
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(FORM, folder.name)
    assert (control.run_dir, control.save, control.tensorboard_dir) == (
        str(folder), f"{folder}/checkpoints", f"{folder}/tb",
    )  # fmt: skip


def test_a_run_with_a_name_keeps_it() -> None:
    control = ControlConfig(run_dir="runs/mine")
    assert with_run_name(control, ParallelMesh.single()) is control


def test_runs_that_start_together_have_different_names(tmp_path: Path) -> None:
    names = iter(["first", "first", "second", "first", "third"])
    with ThreadPoolExecutor(1) as pool:
        found = list(pool.map(lambda _: reserve_name(tmp_path, lambda: next(names)), range(3)))
    assert found == ["first", "second", "third"]


def test_names_that_run_out_are_said(tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    with pytest.raises(StorageError, match=f"{tmp_path} holds a run of every name"):
        reserve_name(tmp_path, lambda: "only")


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"cannot be made in {tmp_path}/file"):
        reserve_name(tmp_path / "file", lambda: "a")
