"""The programs that look at finished runs, as a user starts them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.record import Progress
from megatron.observe.metrics_file import MetricsFile
from tests.train.samples import metrics

TOOLS = Path(__file__).resolve().parents[3] / "tools"


def run_tool(name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Starts a tool from another folder than the project's."""
    command = [sys.executable, str(TOOLS / name), *map(str, words)]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)


def write_run(folder: Path, losses: dict[int, float]) -> Path:
    """A run directory with these losses by step."""
    folder.mkdir()
    with contextlib.closing(MetricsFile(folder / "metrics.jsonl")) as file:
        for step, loss in losses.items():
            file.step(metrics(iteration=step, lm_loss=loss))
        file.evaluation(Progress(6), "valid", 1.5)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """A run that was killed after step 6, and one that was resumed after step 3."""
    killed = write_run(tmp_path / "killed", {step: 8.0 / step for step in range(1, 7)})
    resumed = write_run(tmp_path / "resumed", {step: 8.0 / step + 1e-9 for step in range(4, 11)})
    return killed, resumed


def test_equal_runs_end_with_0(runs: tuple[Path, Path]) -> None:
    done = run_tool("runs/compare_runs.py", runs[0] / "metrics.jsonl", runs[1], "--after", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("|")[0].strip() for line in lines[2:-1]] == ["4", "5", "6"]
    assert lines[-1].startswith("EQUAL: all 3 steps 4 to 6, 0 of them bit for bit")


def test_different_runs_end_with_77(runs: tuple[Path, Path]) -> None:
    done = run_tool("runs/compare_runs.py", *runs, "--after", "3", "--tolerance", "1e-12")
    assert done.returncode == 77
    assert done.stdout.splitlines()[-1].startswith("DIFFERENT: 3 of 3 (steps 4 to 6), first at step 4")


def test_incomparable_runs_are_reported(runs: tuple[Path, Path]) -> None:
    done = run_tool("runs/compare_runs.py", *runs, "--after", "6")
    assert done.returncode == 65
    assert "have no step after 6 in common" in done.stderr
    done = run_tool("runs/compare_runs.py", *runs, runs[0])
    assert done.returncode == 64
    assert "--runs expects one or two runs, got 3" in done.stderr


def test_a_plot_in_the_terminal_and_as_an_image(runs: tuple[Path, Path], tmp_path: Path) -> None:
    done = run_tool("runs/plot_run.py", *runs, "--output", tmp_path / "loss.png")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("killed: 8 -> 1.333 (iterations 1 to 6)\n")
    assert "\nresumed, validation: 1.5 -> 1.5 (iterations 6 to 6)\n" in done.stdout
    assert done.stdout.endswith("loss.png\n")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_a_plot_of_another_metric(runs: tuple[Path, Path]) -> None:
    words = ("--metric", "samples_per_second", "lr", "--x", "tokens", "--smooth", "0.5", "--names", "mine")
    done = run_tool("runs/plot_run.py", runs[0], *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("samples per second\nmine: 16 -> 16 (tokens 896 to 896)\n")
    assert "\nlearning rate\nmine: 0.00015 -> 0.00015 (tokens" in done.stdout
    done = run_tool("runs/plot_run.py", *runs, "--names", "mine", "--no-terminal", "--mark", "5:killed", "here")
    assert "--mark here is invalid" in done.stderr and "5:killed is invalid" not in done.stderr
    assert done.returncode == 64 and "--names has 1 names for 2 runs" in done.stderr
    assert "--no-terminal requires --output" in done.stderr
    done = run_tool("runs/plot_run.py", runs[0], "--metric", "beauty")
    assert done.returncode == 65
    assert "has no step with a finite beauty" in done.stderr


@pytest.mark.full
def test_an_unsupported_image_is_rejected_before_plotting(runs: tuple[Path, Path], tmp_path: Path) -> None:
    done = run_tool("runs/plot_run.py", runs[0], "--output", tmp_path / "loss.xyz")
    assert done.returncode == 64 and done.stdout == ""
    assert "has no known image extension" in done.stderr
    (tmp_path / "folder.png").mkdir()
    done = run_tool("runs/plot_run.py", runs[0], "--output", tmp_path / "folder.png")
    assert done.returncode == 64 and done.stdout == "" and "folder.png is a folder" in done.stderr


def test_one_run_alone_is_explained(runs: tuple[Path, Path]) -> None:
    done = run_tool("runs/compare_runs.py", runs[0])
    assert done.returncode == 65 and "logged no step twice (steps 1 to 6)" in done.stderr
