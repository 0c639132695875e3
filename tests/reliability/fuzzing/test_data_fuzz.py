"""Damaged and malicious files are rejected with an error or harmless, and the fuzzer itself detects failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from megatron.errors import DataError
from tests.reliability.fuzzing import fuzz as fuzz_module
from tests.reliability.fuzzing.fuzz import Case, Fuzzing, Lane, run_case
from tests.reliability.fuzzing.fuzz_targets import Broken, Target
from tests.reliability.fuzzing.mutations import ANY_FILE, Files

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_damaged_and_malicious_files(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """A sample; more cases with `--cases`, others with `--fuzz-seed`. A failure says how to play its case again."""
    cases, seed = pytestconfig.getoption("--cases"), pytestconfig.getoption("--fuzz-seed")
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.reliability.fuzzing.fuzz", "--cases", str(cases), "--seed", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--report", str(report)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-8000:]
    found = json.loads(report.read_text())
    assert found["failures"] == []
    *rows, total = (row.split() for row in found["table"][1:])
    assert total[:2] == ["all", str(cases)] and len(rows) > 20
    accepted, refused = int(total[2]), int(total[3])
    assert accepted + refused == cases and min(accepted, refused) > cases // 10


class _Made(fuzz_module.Cases):
    """Cases that all read with the same function."""

    def __init__(self, read: object) -> None:
        self.undamaged = Path("/nowhere")
        self.read = read

    def __getitem__(self, number: int) -> Case:
        target = Target("made", (("in",),), ANY_FILE, self.read, r"byte \d+")  # type: ignore[arg-type]
        return Case(target, "none", {"in": b"12"}, Random(number))


def became(read: object, folder: Path) -> tuple[str, str]:
    answer = run_case(_Made(read), 0, folder)
    return answer["became"], answer["text"]


def test_every_kind_of_failure_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> None:
        raise DataError(text)

    def break_a_rule() -> None:
        raise Broken("id 700 was accepted")

    def fill() -> int:
        return len(bytes(64 << 20).replace(b"\0", b"x"))

    def spin() -> None:
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass

    assert became(lambda place, *more: refuse(f"{place}/in: byte 7"), tmp_path) == (
        "refused",
        f"{tmp_path}/case/in: byte 7",
    )
    assert became(lambda *more: None, tmp_path) == ("accepted", "")
    assert became(lambda *more: refuse("byte 7"), tmp_path) == ("failed", "refused without naming the file: byte 7")
    assert "naming the place" in became(lambda place, *more: refuse(f"{place}/in"), tmp_path)[1]
    assert "is not the project's:\nTraceback" in became(lambda *more: [][0], tmp_path)[1]
    assert became(lambda *more: break_a_rule(), tmp_path) == ("failed", "accepted, but id 700 was accepted")
    monkeypatch.setattr(fuzz_module, "MEMORY_BYTES", 8 << 20)
    assert "MB, 8 are allowed" in became(lambda *more: fill(), tmp_path)[1]
    monkeypatch.setattr(fuzz_module, "CPU_SECONDS", 0.05)
    assert "s of processor time" in became(lambda *more: spin(), tmp_path)[1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_crash_and_a_hang_are_attributed_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(place: Path, undamaged: Path, draw: Random) -> None:
        number = place.parent / "number"
        count = int(number.read_text()) if number.exists() else 0
        number.write_text(str(count + 1))
        if count == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while count == 3:
            pass

    monkeypatch.setattr(fuzz_module, "CPU_SECONDS", 0.1)
    fuzzing = Fuzzing()
    lane = Lane(_Made(read), iter(range(6)), fuzzing, tmp_path)
    while not lane.is_done:
        if fuzz_module.select.select([lane.descriptor], [], [], 0.1)[0]:
            lane.receive()
        else:
            lane.watch()
    (tally,) = fuzzing.tallies.values()
    assert (tally.cases, tally.accepted, tally.failed) == (6, 4, 2)
    assert [(failure["case"], failure["text"].split(":")[0]) for failure in fuzzing.failures] == [
        (1, "signal SIGKILL"),
        (3, "hangs"),
    ]
    assert "made" in fuzzing.table()[1]


@pytest.mark.parametrize("name", ANY_FILE)
def test_mutations_change_files_and_are_reproducible(name: str) -> None:
    files: Files = {"a": bytes(range(200)), "b": b"text of another file"}
    changed = [ANY_FILE[name](Random(seed), dict(files)) for seed in range(20)]
    assert changed == [ANY_FILE[name](Random(seed), dict(files)) for seed in range(20)]
    assert sum(one != files for one in changed) >= 15
