"""Traces of single steps, taken of a small computation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.config import WatchingConfig
from megatron.errors import ConfigError
from megatron.observe.step_profiler import StepProfiler, check_profile_ranks, profile_notices


def run_steps(profiler: StepProfiler, first: int, last: int) -> None:
    """Steps, each of which multiplies one more time than its number."""
    weights = torch.ones(8, 8)
    for step in range(first, last + 1):
        profiler.before(step)
        for _ in range(step):
            weights @ weights
        profiler.after(step)


def products(path: Path) -> int:
    """How many matrix products a trace has."""
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("name") == "aten::mm" for event in events)


@pytest.mark.parametrize("done", [0, 2], ids=["warm", "from_the_first_step"])
def test_the_window_is_traced_and_nothing_else(tmp_path: Path, done: int, capfd: pytest.CaptureFixture[str]) -> None:
    profiler = StepProfiler(WatchingConfig(profile=(), profile_steps="2,4"), tmp_path, 0, done)
    run_steps(profiler, done + 1, 6)
    profiler.close()
    folder = tmp_path / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0_steps_3_to_4.json", "rank_0_steps_3_to_4.txt"]
    assert products(folder / "rank_0_steps_3_to_4.json") == 3 + 4
    assert "aten::mm" in (folder / "rank_0_steps_3_to_4.txt").read_text()
    assert f"profile of steps 3 to 4: {folder / 'rank_0_steps_3_to_4.json'}" in capfd.readouterr().err


def test_a_run_that_ends_early_keeps_what_was_recorded(tmp_path: Path) -> None:
    profiler = StepProfiler(WatchingConfig(profile=("pt-full",), profile_steps="1,9"), tmp_path, 3)
    run_steps(profiler, 1, 2)
    profiler.close()
    assert not list(tmp_path.iterdir())  # this rank is not asked for
    profiler = StepProfiler(
        WatchingConfig(profile=("pt-full",), profile_steps="1,9", profile_ranks=(0, 3)), tmp_path, 3
    )
    run_steps(profiler, 1, 3)
    profiler.close()
    assert products(tmp_path / "profile" / "rank_3_steps_2_to_3.json") == 2 + 3


def test_a_full_disk_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile").write_text("a file")
    profiler = StepProfiler(WatchingConfig(profile=(), profile_steps="0,1"), tmp_path, 0)
    run_steps(profiler, 1, 2)
    assert "cannot be written" in capfd.readouterr().err


def test_ranks_must_exist() -> None:
    check_profile_ranks(WatchingConfig(profile_ranks=(9,)), 2)
    with pytest.raises(ConfigError, match="--profile-ranks 2 does not exist: this run has 2 ranks, 0 to 1"):
        check_profile_ranks(WatchingConfig(profile=(), profile_ranks=(0, 2)), 2)


def test_what_is_said_before() -> None:
    watching = WatchingConfig(profile=(), profile_ranks=(0, 3))
    assert profile_notices(WatchingConfig(), 0, 100, Path("run")) == []
    (said,) = profile_notices(watching, 0, 100, Path("run"))
    assert said == "steps 11 to 12 are profiled on rank 0, 3, into run/profile"
    for done, end in ((12, 100), (0, 10)):
        (said,) = profile_notices(watching, done, end, Path("run"))
        assert f"this run trains steps {done + 1} to {end}: none is profiled" in said
