"""The form of names, that no two runs get the same one, and that all ranks put it into all folders."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron.config import ParallelRequest, ReportConfig, SavingConfig
from megatron.errors import StorageError
from megatron.parallel.joining import close_mesh, open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.train.start_up.run_names import (
    experiment_name,
    reserve_name,
    with_run_name,
)
from tests.helpers.ranks import run_ranks

AT = time.mktime(time.strptime("2026-11-22 11:30", "%Y-%m-%d %H:%M"))
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
    with pytest.raises(StorageError, match=f"{tmp_path} already has runs with all 1000 drawn names"):
        reserve_name(tmp_path, lambda words: words[0], AT)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"cannot be created in {tmp_path / 'file' / 'logs'}: Not a directory"):
        reserve_name(tmp_path / "file" / "logs", Random(1).choice, AT)


def test_the_name_goes_into_every_folder_that_has_a_place_for_it(tmp_path: Path) -> None:
    asked = {
        "report": ReportConfig(run_dir=f"{tmp_path}/{{run}}", tensorboard_dir="tb"),
        "saving": SavingConfig(save=f"{tmp_path}/{{run}}/ckpt", save_interval=1),
    }
    named: Any = with_run_name(asked, asked["report"].run_dir, ParallelMesh.single())
    assert FORM.fullmatch(Path(named["report"].run_dir).name)
    assert (named["saving"].save, named["report"].tensorboard_dir) == (f"{named['report'].run_dir}/ckpt", "tb")
    assert with_run_name(named, named["report"].run_dir, ParallelMesh.single()) == named


def _run_dir_of(run_dir: str, mesh: ParallelMesh) -> str:
    named: Any = with_run_name({"report": ReportConfig(run_dir=run_dir)}, run_dir, mesh)
    return str(named["report"].run_dir)


def _named(rank: int, parent: str) -> str:
    mesh = open_mesh(ParallelRequest())
    try:
        return _run_dir_of(parent + "/{run}", mesh)
    finally:
        close_mesh(mesh)


def test_all_ranks_use_the_name_of_the_first(tmp_path: Path) -> None:
    first, second = run_ranks(_named, 2, str(tmp_path))
    assert first == second and [str(path) for path in tmp_path.iterdir()] == [first]


def test_a_name_has_its_start_and_three_digits_that_are_drawn() -> None:
    start = time.mktime(time.strptime("2026-01-02 03:04:05", "%Y-%m-%d %H:%M:%S"))
    assert experiment_name(lambda digits: digits[10], start) == "bert_pretrain.2026.01.02.03.04.05.00000aaa"
    starts = [start + microseconds / 1e6 for microseconds in (0, 20, 300, 5_000, 500_000, 999_990, 1_000_000)]
    names = [experiment_name(Random(at).choice, at) for at in starts]
    assert names == sorted(names) and all(EXPERIMENT.fullmatch(name) for name in names)
