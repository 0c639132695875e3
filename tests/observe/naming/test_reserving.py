"""Checks that no two runs get the same name, and that all ranks put it into all folders."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from megatron.config import ControlConfig, ParallelRequest
from megatron.errors import StorageError
from megatron.observe.naming.reserving import reserve_name, with_run_name
from megatron.parallel.joining import close_mesh, open_mesh
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.ranks import run_ranks

AT = time.strptime("2026-11-22 11:30", "%Y-%m-%d %H:%M")
FORM = re.compile(r"[a-z]+_[a-z]+-\d{8}")
EXPERIMENT = re.compile(r"bert_pretrain\.\d{4}(\.\d\d){5}\.[0-9a-f]{8}")


def test_runs_that_draw_the_same_words_at_once_get_different_names(tmp_path: Path) -> None:
    """Every thread draws the same sequence, so each but the first finds names taken."""
    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(lambda _: reserve_name(tmp_path / "logs", Random(1).choice, AT), range(8)))
    assert len(set(names)) == 8 and all(FORM.fullmatch(name) for name in names)
    assert {path.name for path in (tmp_path / "logs").iterdir()} == set(names)


def test_a_folder_without_free_names_and_one_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    reserve_name(tmp_path, lambda words: words[0], AT)
    with pytest.raises(StorageError, match=f"{tmp_path} holds a run of every one of the 1000 names"):
        reserve_name(tmp_path, lambda words: words[0], AT)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"cannot be made in {tmp_path / 'file' / 'logs'}: Not a directory"):
        reserve_name(tmp_path / "file" / "logs", Random(1).choice, AT)


def test_the_name_goes_into_every_folder_that_has_a_place_for_it(tmp_path: Path) -> None:
    folders = {"run_dir": f"{tmp_path}/{{run}}", "save": f"{tmp_path}/{{run}}/ckpt", "tensorboard_dir": "tb"}
    control = with_run_name(ControlConfig(**folders, save_interval=1), ParallelMesh.single())
    assert control.run_dir is not None and FORM.fullmatch(Path(control.run_dir).name)
    assert (control.save, control.tensorboard_dir) == (f"{control.run_dir}/ckpt", "tb")
    assert with_run_name(control, ParallelMesh.single()) is control


def test_an_experiment_has_a_name_of_another_form(tmp_path: Path) -> None:
    control = with_run_name(ControlConfig(run_dir=f"{tmp_path}/all/{{experiment}}"), ParallelMesh.single())
    assert [str(path) for path in (tmp_path / "all").iterdir()] == [control.run_dir]
    assert EXPERIMENT.fullmatch(Path(str(control.run_dir)).name)


def _named(rank: int, parent: str) -> str | None:
    mesh = open_mesh(ParallelRequest())
    try:
        return with_run_name(ControlConfig(run_dir=parent + "/{run}"), mesh).run_dir
    finally:
        close_mesh(mesh)


def test_all_ranks_use_the_name_of_the_first(tmp_path: Path) -> None:
    first, second = run_ranks(_named, 2, str(tmp_path))
    assert first == second and [str(path) for path in tmp_path.iterdir()] == [first]
