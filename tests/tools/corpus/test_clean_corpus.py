"""The cleaning command."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.tools.corpus.in_process import run_tool
from tools.corpus import clean_corpus

TOOL = clean_corpus.__file__
TEXT = "It is said that the house by the river has stood there for more than two hundred years, and that it will stay."


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_tool(clean_corpus.main, folder, *words)


def lines_of(*texts: str) -> bytes:
    return b"".join(json.dumps({"id": number, "text": text}).encode() + b"\n" for number, text in enumerate(texts))


def test_the_command_with_a_report(tmp_path: Path) -> None:
    for package in ("ftfy", "py3langid"):
        pytest.importorskip(package, reason=f"the {package} package is not installed")
    german = "Man sagt, dass das Haus am Fluss seit mehr als zweihundert Jahren dort steht, und dass es bleiben wird."
    (tmp_path / "in.jsonl").write_bytes(lines_of(TEXT, german, "short", TEXT, TEXT[:60] + " cafÃ©.") + b"{\n")
    words = [
        "--input",
        "*.jsonl",
        "--output",
        "out/clean.jsonl",
        "--fix-text",
        "--normalize-space",
        "--language",
        "en,fr",
    ]
    words += ["--min-characters", "20", "--exact-duplicates", "--report", "report.json", "--dropped", "dropped.jsonl"]
    done = run(tmp_path, *words)
    assert done.returncode == 65 and "in.jsonl:6: byte offset 5" in done.stderr
    done = run(tmp_path, *words, "--on-bad-line", "skip", "--workers", "2")
    assert done.returncode == 0, done.stderr
    kept = [json.loads(line) for line in (tmp_path / "out" / "clean.jsonl").read_bytes().splitlines()]
    assert kept == [{"id": 0, "text": TEXT}, {"id": 4, "text": TEXT[:60] + " café."}]
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert (report["read"], report["kept"], report["dropped"], report["changed"]) == (6, 2, 4, 1)
    assert {reason: found["documents"] for reason, found in report["dropped_for"].items()} == {
        "bad line": 1,
        "exact duplicate": 1,
        "language": 1,
        "too few characters": 1,
    }
    dropped = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_bytes().splitlines()]
    assert [(entry["reason"], entry["line"]) for entry in dropped] == [
        ("language", 2),
        ("too few characters", 3),
        ("exact duplicate", 4),
        ("bad line", 6),
    ]
    assert dropped[0]["document"] == {"id": 1, "text": german} and dropped[0]["source"] == "in.jsonl"
    table = done.stderr.splitlines()
    assert any(line.split() == ["dropped", "4", "66.67%"] for line in table)
    assert any("in.jsonl:3: 'short' ('5')" in line for line in table)


def test_near_duplicates_and_contamination_by_flags(tmp_path: Path) -> None:
    pytest.importorskip("datasketch", reason="the datasketch package is not installed")
    question = "Which bridge did masons from Ghent build after floods took away its wooden one?"
    (tmp_path / "task.txt").write_text(question + "\n")
    texts = [TEXT, TEXT.replace("the house", "the old house"), f"{TEXT} {question}", "a " * 60, TEXT[::-1]]
    (tmp_path / "in.jsonl").write_bytes(lines_of(*texts))
    words = ["--input", "in.jsonl", "--output", "out.jsonl.gz", "--report", "report.json", "--near-duplicates"]
    words += ["--near-threshold", "0.5", "--num-perm", "64", "--near-shingle", "3", "--seed", "5"]
    words += [
        "--decontaminate",
        "task.*",
        "--decontaminate-mode",
        "drop",
        "--max-ngram-size",
        "10",
        "--gopher-repetition",
    ]
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    kept = [json.loads(line)["id"] for line in gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()).splitlines()]
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert kept == [0, 4]
    assert set(report["dropped_for"]) == {"contaminated", "near duplicate", "repetition: in the most frequent 2-grams"}
    assert "Counting 5 word runs" in done.stderr
    contradiction = run(tmp_path, *words, "--min-ngram", "11")
    assert contradiction.returncode == 64 and "--min-ngram 11 is more than --ngram 10" in contradiction.stderr


def test_standard_input_and_no_kept_documents(tmp_path: Path) -> None:
    command = [sys.executable, TOOL, "--input", "-", "--output", "out.jsonl", "--max-words", "2"]
    lines = lines_of(TEXT, TEXT)
    done = subprocess.run(command, cwd=tmp_path, input=lines, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0
    assert b"None of 2 documents was kept" in done.stderr and b"<stdin>:1: 'It is said" in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_flags_that_contradict_each_other(tmp_path: Path) -> None:
    words = ["--min-tokens", "128", "--min-words", "9", "--max-words", "8", "--keep-curly-quotes"]
    done = run(tmp_path, "--input", "none.jsonl", "--output", "out.jsonl", *words)
    assert done.returncode == 64
    for sentence in (
        "--min-tokens 128 requires --tokenizer-type",
        "--min-words 9 is more than --max-words 8",
        "--keep-curly-quotes requires --fix-text",
    ):
        assert sentence in done.stderr
    done = run(tmp_path, "--input", "none.jsonl", "--output", "out.jsonl")
    assert done.returncode == 64 and "--input none.jsonl cannot be read" in done.stderr


SAID = {signal.SIGTERM: b"terminated by SIGTERM", signal.SIGINT: b"interrupted from the keyboard"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_leaves_nothing(tmp_path: Path, number: int) -> None:
    (tmp_path / "out.jsonl").write_bytes(b"from before\n")
    (tmp_path / "in.jsonl").write_bytes(lines_of(*[f"{TEXT} {place}" for place in range(60_000)]))
    words = ["--input", "in.jsonl", "--output", "out.jsonl", "--dropped", "gone.jsonl", "--workers", "2"]
    command = [sys.executable, TOOL, *words, "--gopher-repetition", "--gopher-quality"]
    minds_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a suite in the background does not
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, preexec_fn=minds_interrupts) as process:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob(".*.tmp"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.stderr is not None and SAID[number] in process.stderr.read()
        assert process.wait(120) == 128 + number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert (tmp_path / "out.jsonl").read_bytes() == b"from before\n"
