"""Upstream's program for the evaluation harness: the same figures from one process and from several ranks."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.parallel.mesh import ParallelMesh
from tasks.eval_harness import evaluate
from tests.helpers.ranks import run_ranks
from tests.inference.checkpoints import make_checkpoint
from tests.trident.evaluate.harness.harness_tasks import TASKS, offline, write_tasks
from trident.evaluate.harness import run_harness

pytest.importorskip("lm_eval")

GUIDE = Path(__file__).resolve().parents[4] / "docs" / "evaluation_harness.md"


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


@pytest.mark.full
@pytest.mark.slow
def test_the_command_of_the_guide_finds_on_one_process_what_ranks_find(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = re.findall(r"```bash\npython tasks/eval_harness/evaluate.py (.*?)```", GUIDE.read_text(), flags=re.S)
    words = shlex.split(command.replace("\\\n", " "))
    for name, source in (("my_tasks", flags[3]), ("checkpoints/demo", flags[1])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(source)
    monkeypatch.chdir(tmp_path)
    assert evaluate.main(words) == 0
    one = json.loads((tmp_path / "harness.json").read_text())
    assert set(one["results"]) == set(TASKS) == set(one["versions"])
    assert '"own_choices"' in capsys.readouterr().out
    words[words.index("harness.json")] = "ranks.json"
    assert run_ranks(run_here, 2, [*words, "--tensor-model-parallel-size", "2", "--eval_fp32"]) == [0, 0]
    first, second = figures(tmp_path / "harness.json"), figures(tmp_path / "ranks.json")
    numbers = [name for name, value in first.items() if isinstance(value, int | float) and "stderr" not in name]
    assert len(numbers) > 5
    assert {name: second[name] for name in numbers} == pytest.approx({name: first[name] for name in numbers}, rel=1e-4)


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
