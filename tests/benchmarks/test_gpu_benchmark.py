"""The page of GPU measurements: its parts run on a CPU with tiny sizes, and its records become tables."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import programs, training
from benchmarks.gpu.context import TINY, Context
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.records import RESULTS, Recorder, Target, page, read_records
from megatron.errors import ConfigError

# What needs neither a process of its own nor the compiled operations, with which tests/kernels runs more.
TINY_PARTS = ("build", "ops", "ring", "345m-fp16", "experts", "fp8", "zero", "sanitizer")


@pytest.mark.full
def test_parts_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_KERNELS", str(tmp_path))
    monkeypatch.setenv("PATH", "")  # without compute-sanitizer and nvcc, wherever this runs
    for name in TINY_PARTS:
        PARTS[name].run(Context(name, tmp_path, torch.device("cpu"), TINY, seconds=100, scratch=tmp_path / "scratch"))
    records = read_records([tmp_path / RESULTS])
    assert {record["part"] for record in records} == set(TINY_PARTS)
    assert not [record for record in records if record["figure"] == "failed"]
    rates = {record["details"]["of"] for record in records if record["figure"] == "tokens per second"}
    figures = {(record["part"], record["figure"]): record for record in records}
    assert figures["345m-fp16", "steps"]["value"] == 2
    assert figures["ring", "largest difference, relative"]["met"] is True
    assert figures["ring", "ring in times of flash attention"]["value"] > 0
    assert figures["ops", "not measured"]["text"].startswith("no library of compiled operations")
    assert figures["sanitizer", "not run"]["text"] == "compute-sanitizer is not installed"
    assert figures["experts", "grouped kernel in times of the loop"]["details"]["of"] == "training"
    assert figures["fp8", "fp8 in times of bf16"]["value"] > 0 and {"bf16", "fp8 tensorwise", "fp8 rowwise"} <= rates
    assert figures["experts", "largest gradient of an expert without rows"]["met"]
    assert {"grouped kernel", "loop over experts", "capacity of 1"} <= rates
    text = "\n".join(page(records))
    assert "### experts" in text and "targets met." in text


@pytest.mark.full
def test_contenders_are_processes_that_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_KERNELS", str(tmp_path))
    PARTS["llama1b-4096"].run(Context("llama1b-4096", tmp_path, torch.device("cpu"), TINY, seconds=200))
    records = read_records([tmp_path / RESULTS])
    assert not [record for record in records if record["figure"] in ("failed", "not measured")], (
        tmp_path / "llama1b-4096.log"
    ).read_text()
    rates = [record["details"]["of"] for record in records if record["figure"] == training.RATE]
    assert rates == ["ours, --cuda-graphs auto", "plain PyTorch, torch.compile", "ours"]
    profiled = {record["details"]["of"] for record in records if record["figure"] == "profile, gaps"}
    assert profiled == set(rates)
    ratios = [record for record in records if record["figure"] == "ours in times of the best of the others"]
    assert [record["details"]["compared"] for record in ratios] == [2, 3]


CONTENDER = """#!/bin/sh
while [ "$1" != --contender ]; do shift; done
read -r turn
[ "$2" = $KILLED ] && kill -9 $$
echo '{"part": "124m", "figure": "tokens per second", "value": 1, "details": {"of": "'$2'"}}' >> "$RESULTS"
"""


@pytest.mark.parametrize("killed", training.DECIDING)
def test_a_contender_that_is_killed_leaves_the_others_their_turns(
    killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "contender.sh"
    program.write_text(CONTENDER)
    program.chmod(0o755)
    monkeypatch.setenv("KILLED", killed)
    monkeypatch.setenv("RESULTS", str(tmp_path / RESULTS))
    monkeypatch.setattr(sys, "executable", str(program))
    training.measure_model(Context("124m", tmp_path, torch.device("cpu"), TINY, seconds=100.0))
    records = read_records([tmp_path / RESULTS])
    left = [record["details"]["of"] for record in records if record["figure"] == training.RATE]
    assert left == [name for name in training.DECIDING if name != killed]
    (failed,) = [record for record in records if record["figure"] == "failed"]
    assert failed["details"] == {"of": killed} and failed["text"] == "exit status -9; see 124m.log"


def test_parts_follow_each_other_until_the_time_is_up(tmp_path: Path) -> None:
    begun = []

    def run(name: str, seconds: float) -> int:
        begun.append((name, seconds))
        return 7 if name == "124m" else 0

    flags = program.PageFlags(output=str(tmp_path), minutes=1.0)
    (tmp_path / "124m.log").write_text("died")
    (tmp_path / "scratch").mkdir()
    program.run_parts(flags, ["head", "124m", "sanitizer", "zero"], run)
    assert [name for name, _ in begun] == ["head", "124m"]
    with tarfile.open(tmp_path / program.ARCHIVE) as archive:
        assert archive.getnames() == [f"gpu-page/{name}" for name in ("124m.log", "results.jsonl", "results.md")]
        assert b"time was up" in archive.extractfile("gpu-page/results.jsonl").read()
    assert all(0 < seconds <= 60 for _, seconds in begun)
    records = read_records([tmp_path / RESULTS])
    assert "exit status 7; see 124m.log" in [record.get("text") for record in records]
    assert records[-1]["text"] == "time was up; go on with --parts sanitizer,zero"
    assert program.chosen_parts("zero, ops") == ["ops", "zero"] and program.chosen_parts("all") == list(PARTS)
    with pytest.raises(ConfigError, match="unknown part warp, bends. Use build, ready, 124m"):
        program.chosen_parts("warp,ops,bends")


def test_a_part_is_a_process_whose_end_is_known(tmp_path: Path) -> None:
    words = ["--parts", "build", "--scale", "tiny", "--device", "cpu", "--output", str(tmp_path), "--commit", "abc"]
    assert program.main(words) == 0
    records = read_records([tmp_path / RESULTS])
    assert {"part": "machine", "figure": "commit", "text": "abc", "details": {}} in records
    assert [record["figure"] for record in records if record["part"] == "build"] == ["not built", "time of the part"]
    assert "commit abc" in (tmp_path / "results.md").read_text("utf-8")


def test_nothing_outlives_a_part_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    part = tmp_path / "part.sh"
    part.write_text(f"#!/bin/sh\nsleep 300 &\necho $! >{child}.new\nmv {child}.new {child}\nwait\n")
    part.chmod(0o755)
    monkeypatch.setattr(program, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(sys, "executable", str(part))
    assert program._as_process(program.PageFlags(output=str(tmp_path)), "head", 2.0) == 124
    pid, deadline = int(child.read_text()), time.monotonic() + 120
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return state.strip() not in ("", "Z")


def test_records_become_a_table_with_verdicts(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "head")
    recorder.figure("time", 1.234567, "ms", target=Target(at_most=1.5), of="a | b")
    recorder.figure("share", 0.5, "", target=Target(at_least=0.85))
    recorder.note("not measured", "out of time")
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"part": "head", "fig')  # killed while it wrote
    lines = list(page(read_records([tmp_path / RESULTS])))
    assert "| a \\| b | time | 1.2346 ms | ≤ 1.5 | met |" in lines
    assert "|  | share | 0.5 | ≥ 0.85 | missed |" in lines
    assert lines[-1] == "1 of 2 targets met."
    assert json.loads((tmp_path / RESULTS).read_text().splitlines()[1])["met"] is False


def test_words_of_programs_are_understood(tmp_path: Path) -> None:
    assert programs.test_counts("= 2 failed, 31 passed, 4 skipped, 1 error in 3.2s =") == {
        **{"passed": 31, "failed": 2},
        **{"skipped": 4, "error": 1},
    }
    assert programs.test_counts("Segmentation fault")["error"] == 1
    files = programs.files_of_gpu_tests(programs.ROOT / "tests")
    assert "tests/seeds/turkish_gpt2/test_gpu_block.py" in files and "tests/test_errors.py" not in files
    context = Context("tests", tmp_path, torch.device("cpu"), TINY, seconds=100)
    done = programs.run(context, "-c", "print('one passed'); raise SystemExit(3)")
    assert done.returncode == 3 and "one passed" in (tmp_path / "tests.log").read_text()
    began_at = time.monotonic()
    programs.run(context, "-c", "import time; print('begun', flush=True); time.sleep(600)", seconds=0.5)
    assert time.monotonic() - began_at < 120
    assert read_records([tmp_path / RESULTS])[-1]["figure"] == "stopped"
