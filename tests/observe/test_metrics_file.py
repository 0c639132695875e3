"""`metrics.jsonl`: exact numbers, no torn lines, one writer."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.record import Progress
from megatron.errors import ConfigError, DataError, StorageError
from megatron.observe.metrics_file import MetricsFile, read_records, read_steps
from tests.train.samples import Measured, metrics


def write(path: Path, *losses: float, first: int = 1) -> None:
    """Writes one step record per loss."""
    with contextlib.closing(MetricsFile(path)) as file:
        for step, loss in enumerate(losses, start=first):
            file.step(metrics(iteration=step, lm_loss=loss))


def test_records_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with contextlib.closing(MetricsFile(path)) as file:
        file.start(Progress(6, 48, 768), {"world_size": 4, "tensor_model_parallel_size": 2, "lr": 0.1})
        file.step(metrics())
        file.interval(metrics())
        file.evaluation(Progress(7, 56, 896), "valid", 2.0)
        file.evaluation(Progress(7, 56, 896), "test", None)
        file.task(Progress(7, 56, 896), Measured())
        file.skipped_batch(Progress(7, 64, 1024), {"step": 8, "first_sample": 56, "last_sample": 63}, 2)
        file.failed_save(Progress(7, 64, 1024), 6, "no room at mongodb://me:hunter2@host/db", 1)
    start, step, evaluation, empty, task, passed, failed = read_records(path)
    assert (empty["group"], empty["lm_loss"], empty["perplexity"]) == ("test", None, None)
    assert (start["kind"], start["step"], start["world_size"], start["tensor_model_parallel_size"]) == (
        "start",
        6,
        4,
        2,
    )
    assert (step["kind"], step["iteration"], step["lm_loss"], step["loss_scale"]) == ("step", 7, 9.87654321, None)
    assert (evaluation["kind"], evaluation["group"], evaluation["perplexity"]) == ("evaluation", "valid", math.exp(2.0))
    assert (task["kind"], task["iteration"], task["task"], task["count"]) == ("task", 7, "cloze", 12)
    assert (task["figures"], task["errors"]) == ({"acc": 0.25, "ppl": 7.5}, {"acc": 0.125})
    assert (passed["kind"], passed["iteration"], passed["passed_batches"]) == ("passed", 8, 2)
    assert (passed["first_sample"], passed["last_sample"]) == (56, 63)
    assert (failed["kind"], failed["iteration"], failed["failed_saves"]) == ("failed_save", 6, 1)
    assert failed["text"].startswith("no room at ") and "hunter2" not in failed["text"]


@given(loss=st.floats(allow_nan=False))
def test_numbers_round_trip_bit_for_bit(loss: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("exact") / "metrics.jsonl"
    write(path, loss)
    assert read_steps(path)[1]["lm_loss"].hex() == loss.hex()


def test_nan_is_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, math.nan, math.inf, -math.inf)

    def refuse(text: str) -> Any:
        raise AssertionError(text)

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    steps = read_steps(path)
    assert math.isnan(steps[1]["lm_loss"])
    assert (steps[2]["lm_loss"], steps[3]["lm_loss"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("torn", [b'{"kind":"step","iterati', b"\x00" * 70000, b"{}", b"\xff\xfe", b'{"a":' * 100000])
def test_a_torn_last_line_is_removed_on_resume(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1.0, 2.0)
    path.write_bytes(path.read_bytes() + torn)
    assert list(read_steps(path)) == [1, 2]
    write(path, 3.0, first=3)
    assert [record["lm_loss"] for record in read_steps(path).values()] == [1.0, 2.0, 3.0]


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1.0, 2.0)
    path.write_bytes(path.read_bytes()[:-1])
    write(path, 3.0, first=3)
    assert list(read_steps(path)) == [1, 2, 3]


def test_the_later_record_of_a_repeated_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1.0, 2.0, 3.0)
    write(path, 20.0, 30.0, first=2)
    assert [record["lm_loss"] for record in read_steps(tmp_path).values()] == [1.0, 20.0, 30.0]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1.0)
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(DataError, match=r"metrics.jsonl:1: not a JSON object with a kind: b'nonsense'"):
        read_records(path)


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with (
        contextlib.closing(MetricsFile(path)),
        pytest.raises(ConfigError, match=r"metrics.jsonl is being written.*--run-dir"),
    ):
        MetricsFile(path)
    MetricsFile(path).close()


def test_what_a_full_disk_took_of_a_record_is_removed(tmp_path: Path) -> None:
    """Also when it cannot be removed at once."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.step(metrics(iteration=1))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step, truncates in ((2, True), (3, False)):
        whole = path.stat().st_size
        with pytest.MonkeyPatch.context() as patch:
            if not truncates:
                patch.setattr(os, "ftruncate", refuse)
            resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 100, limit[1]))
            try:
                with pytest.raises(StorageError, match="could not be appended: File too large"):
                    file.step(metrics(iteration=step))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert path.stat().st_size == whole + (0 if truncates else 100)
    file.step(metrics(iteration=4))
    file.close()
    assert list(read_steps(path)) == [1, 4]
    assert path.read_bytes().count(b"\n") == 2


def refuse(*words: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_file_that_cannot_be_repaired_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind":"st')
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(StorageError, match=r"metrics.jsonl: its incomplete last line could not be removed: Input/out"):
        MetricsFile(path)
