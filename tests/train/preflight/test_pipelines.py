"""A pipeline schedule from a file is checked before torch is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.parse import read_flags
from megatron.config.run_config import RunRequest
from megatron.train.preflight.pipelines import schedule_problems
from tests.config.command_lines import words

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def request(path: Path, *more: str) -> RunRequest:
    flags = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", str(path)]
    return read_flags([*words(), *flags, *more]).unchecked()


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (GOOD, (), []),
        (GOOD, ("--ds-sequence-parallel-size", "2"), ["is for 2 micro-batches (a step has 4: --global-batch-size)"]),
        (GOOD, ("--global-batch-size", "16"), ["is for 2 micro-batches (a step has 4: --global-batch-size)"]),
        (GOOD.replace("0B1", "0I1,0W1"), (), []),
        (GOOD.replace("0B1", "0I1,0W1"), ("--compile",), ["--compile cannot be combined with --pipeline-schedule"]),
        (GOOD.replace("0F1,0B0", "0B0,0F1").replace("1B0,1F1", "1F1,1B0"), (), ["deadlocks: 0B0 on rank 0 waits"]),
    ],
)
def test_a_file_is_held_against_the_run(tmp_path: Path, text: str, more: tuple[str, ...], said: list[str]) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    problems = list(schedule_problems(request(path, *more), 4))  # two replicas: 8 samples are 2 micro-batches of 2
    assert len(problems) == len(said)
    assert all(part in problem for part, problem in zip(said, problems, strict=True)), problems


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (problem,) = schedule_problems(request(tmp_path / "no.csv"), 4)
    assert "no.csv cannot be read: No such file" in problem


def test_named_schedules_have_no_file() -> None:
    assert list(schedule_problems(read_flags(words("--rampup-batch-size 4 4 8")).unchecked(), 1)) == []
