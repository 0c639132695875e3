"""A few cases of each campaign, and of the machinery that finds and attributes problems."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from campaigns import run as campaign_runner
from campaigns.campaign import Plan, Result, Summary
from campaigns.fuzzing import fuzzer
from campaigns.fuzzing.mutations import ANY_FILE, Files
from campaigns.fuzzing.target import Broken, Target
from campaigns.run import CAMPAIGNS, main, run_campaign
from megatron.errors import DataError
from tests.helpers.ranks import run_ranks

# These fork, so they need a process without threads; the others start processes of their own.
FORKING = ("tool-kills", "hostile-checkpoints", "data-files", "settings", "manifests")
ONLY_ON_LINUX = {"kills", "tool-kills", "soak", *FORKING}
NEEDS = {"store-kills": ("s3fs", "moto.server"), "requests": ("starlette", "uvicorn")}
# Whole runs that other tests show in one form or another.
WITH_ALL = ("preemption", "store-kills", "soak", "hangs")
Read = Callable[[Path, Path, Random], object]


def run_in_rank(rank: int, name: str, plan: Plan) -> tuple[Summary, str]:
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        return run_campaign(name, plan), errors.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in WITH_ALL else ()) for name in CAMPAIGNS]
)
def test_a_sample_shows_no_problem(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Other cases with `--fuzz-seed`."""
    if name in ONLY_ON_LINUX and sys.platform != "linux":
        pytest.skip("needs Linux's /proc")
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    plan = Plan(tmp_path.resolve(), pytestconfig.getoption("--fuzz-seed"), CAMPAIGNS[name].sample)
    if name in FORKING:
        ((summary, text),) = run_ranks(run_in_rank, 1, name, plan, timeout_seconds=600)
    else:
        summary, text = run_in_rank(0, name, plan)
    assert not summary.problems, text
    assert summary.cases >= 1


def test_cases_are_determined_by_seed_and_number(tmp_path: Path) -> None:
    plan = Plan(tmp_path, seed=3)
    assert plan.random(7).random() == Plan(tmp_path, seed=3, case=7).random(7).random()
    assert plan.random(7).random() != plan.random(8).random() != Plan(tmp_path, seed=4).random(8).random()
    with pytest.raises(ValueError, match="--only 'x': no kind contains it; the kinds are a, b"):
        Plan(tmp_path, only="x").names(["a", "b"])


def test_a_problem_is_printed_with_its_command_and_fails_the_campaign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_cases(plan: Plan) -> Iterator[Result]:
        for number in plan.numbers:
            yield Result(
                number, "even" if number % 2 == 0 else "odd", "good", "lost" if number == 2 else "", number / 2
            )

    monkeypatch.setattr(campaign_runner.Entry, "load", lambda self: run_cases)
    report = tmp_path / "report.json"
    assert main(["layouts", "--cases", "4", "--seed", "9", "--report", str(report)]) == 1
    text = capfd.readouterr()
    assert "case 2, even: lost\n    run it again: python -m campaigns.run layouts --seed 9 --case 2\n" in text.err
    assert [line.split() for line in text.out.splitlines()[:5]] == [
        ["cases", "good", "problem"],
        ["even", "2", "1", "1"],
        ["odd", "2", "2", "0"],
        ["all", "4", "3", "1"],
        ["seconds:", "median", "1.00,", "longest", "1.50"],
    ]
    assert '"problem": "lost"' in report.read_text()
    assert main(["layouts", "--case", "1"]) == 0 and main(["--list"]) == 0


def test_every_campaign_can_be_imported() -> None:
    assert all(callable(entry.load()) for entry in CAMPAIGNS.values())


class _OneTarget(fuzzer.Cases):
    """Cases that all use the same reader."""

    def __init__(self, read: Read) -> None:
        self.undamaged, self.read = Path("/nowhere"), read

    def __getitem__(self, number: int) -> fuzzer.Case:
        target = Target("made", (("in",),), ANY_FILE, self.read, r"byte \d+")  # type: ignore[arg-type]
        return fuzzer.Case(target, "none", {"in": b"12"}, Random(number))


def _refuse(text: str) -> None:
    raise DataError(text)


def _violate() -> None:
    raise Broken("id 700 was accepted")


def _spin() -> None:
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass


@pytest.mark.parametrize(
    ("read", "outcome", "problem"),
    [
        (lambda folder, *rest: _refuse(f"{folder}/in: byte 7"), "refused", ""),
        (lambda *rest: None, "accepted", ""),
        (lambda *rest: _refuse("byte 7"), "refused", "without naming the file: byte 7"),
        (lambda folder, *rest: _refuse(f"{folder}/in"), "refused", "without naming the position"),
        (lambda *rest: [][0], "refused", "with a foreign exception:\nTraceback"),
        (lambda *rest: _violate(), "accepted", "accepted, but id 700 was accepted"),
        (lambda *rest: len(bytes(64 << 20).replace(b"\0", b"x")), "accepted", "MB, 8 are allowed"),
        (lambda *rest: _spin(), "accepted", "s of processor time"),
    ],
)
def test_the_fuzzer_detects_each_kind_of_problem(
    read: Read, outcome: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "8 are" in problem:
        monkeypatch.setattr(fuzzer, "MEMORY_BYTES", 8 << 20)
    if "processor" in problem:
        monkeypatch.setattr(fuzzer, "CPU_SECONDS", 0.05)
    result = fuzzer.run_case(_OneTarget(read), 0, tmp_path)
    assert result.outcome == outcome
    assert problem in result.problem if problem else not result.problem


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_crash_and_a_hang_are_attributed_and_the_other_cases_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(folder: Path, undamaged: Path, draw: Random) -> None:
        number = folder.parent / "number"
        count = int(number.read_text()) if number.exists() else 0
        number.write_text(str(count + 1))
        if count == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while count == 3:
            pass

    monkeypatch.setattr(fuzzer, "CPU_SECONDS", 0.1)
    lane, results = fuzzer.Lane(_OneTarget(read), iter(range(6)), tmp_path), []
    while not lane.is_done:
        is_readable = select.select([lane.descriptor], [], [], 0.1)[0]
        results += lane.receive() if is_readable else lane.watch()
    assert [(result.number, result.problem.split(":")[0]) for result in results] == [
        (0, ""), (1, "signal SIGKILL"), (2, ""), (3, "hangs"), (4, ""), (5, ""),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ANY_FILE)
def test_mutations_change_files_and_are_reproducible(name: str) -> None:
    files: Files = {"a": bytes(range(200)), "b": b"text of another file"}
    changed = [ANY_FILE[name](Random(seed), dict(files)) for seed in range(20)]
    assert changed == [ANY_FILE[name](Random(seed), dict(files)) for seed in range(20)]
    assert sum(one != files for one in changed) >= 15
