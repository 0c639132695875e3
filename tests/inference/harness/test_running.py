"""Upstream's program for the evaluation harness: the same figures from one process and from several ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.inference.harness.running import run_harness
from megatron.parallel.mesh import ParallelMesh
from tasks.eval_harness import evaluate
from tests.helpers.ranks import run_ranks
from tests.inference.checkpoints import make_checkpoint
from tests.inference.harness.harness_tasks import TASKS, offline, write_tasks

pytest.importorskip("lm_eval")


@pytest.fixture(scope="module", autouse=True)
def without_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with offline(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("harness")
    tasks = write_tasks(folder)
    return ["--load", str(make_checkpoint(folder)), "--include_path", str(tasks), "--micro-batch-size", "1"]


def run_here(rank: int, flags: list[str]) -> int:
    return evaluate.main(flags)


def figures(path: Path) -> dict[str, float]:
    """Every figure of a file of results."""
    found: dict[str, Any] = json.loads(path.read_text())["results"]
    return {
        f"{task}/{name}": value for task, part in found.items() for name, value in part.items() if value is not None
    }


@pytest.mark.slow
def test_ranks_find_what_one_process_finds(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [
        "--task_list",
        ",".join(TASKS),
        "--adaptive_seq_len",
        "--bootstrap_iters",
        "10",
        "--micro_bs_multiplier",
        "2",
    ]
    assert evaluate.main([*flags, *more, "--intermed_results", "--results_path", str(tmp_path / "one.json")]) == 0
    one = json.loads((tmp_path / "one.json").read_text())
    assert set(one["results"]) == set(TASKS) == set(one["versions"])
    assert '"own_choices"' in capsys.readouterr().out
    split = ["--tensor-model-parallel-size", "2", "--eval_fp32", "--results_path", str(tmp_path / "two.json")]
    assert run_ranks(run_here, 2, [*flags, *more, *split]) == [0] * 2
    first, second = figures(tmp_path / "one.json"), figures(tmp_path / "two.json")
    numbers = {name for name, value in first.items() if isinstance(value, int | float)}
    assert len(numbers) > 8
    for name in numbers - {name for name in numbers if "stderr" in name}:
        assert second[name] == pytest.approx(first[name], rel=1e-4), name


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--task_list", "all"], "--task_list all is not supported"),
        (["--task_list", "own_choices", "--limit", "0"], "--limit 0"),
    ],
)
def test_what_cannot_be_run_is_refused(flags: list[str], tmp_path: Path, more: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        evaluate.main([*flags, *more, "--results_path", str(tmp_path / "r.json")])


def test_an_unknown_task_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def without_tasks(**settings: Any) -> Any:  # the real index takes seconds
        seen.append(settings.get("include_defaults", True))
        return SimpleNamespace(all_tasks=["known"])

    monkeypatch.setattr("lm_eval.tasks.TaskManager", without_tasks)
    with pytest.raises(ConfigError, match="has no task unheard_of"):
        run_harness(None, ParallelMesh.single(), ["known", "unheard_of"])
    assert seen == [False, True]
