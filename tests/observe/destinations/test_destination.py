"""A destination that fails is a warning, is tried again if that makes sense, and ends with what it lacks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.errors import StorageError
from megatron.observe.destinations.destination import Safeguard
from megatron.observe.destinations.tensorboard import TensorBoard
from tests.train.samples import WORKLOAD, Measured, metrics, report_config


class Fragile:
    """A destination that refuses the records of some steps."""

    def __init__(self, refuses: set[int], is_buffered: bool = False, failure: BaseException | None = None) -> None:
        self.name = "FILE"
        self.is_buffered = is_buffered
        self.refuses = refuses
        self.failure = failure or OSError(28, "No space left on device")
        self.recorded: list[str] = []

    def __getattr__(self, kind: str) -> Any:
        if kind.startswith("_"):
            raise AttributeError(kind)
        return lambda *words: self._take(kind, *words)

    def _take(self, kind: str, first: Any = None, *_: Any) -> None:
        step = -1 if first is None else first.step if isinstance(first, Progress) else first.value("iteration")
        if kind == "interval" and not self.is_buffered:
            return
        if step in self.refuses:
            raise self.failure
        self.recorded.append(f"{kind} {step}")


def write_step(guarded: Safeguard, step: int) -> None:
    guarded.record("step", step, lambda one: one.step(metrics(iteration=step)))


def write_interval(guarded: Safeguard, step: int) -> None:
    guarded.record("interval", step, lambda one: one.interval(metrics(iteration=step)))


def run(destination: Any, steps: int = 8, interval: int = 2) -> None:
    guarded = Safeguard(destination)
    guarded.record("start", 0, lambda one: one.start(Progress(), {"seed": 1}))
    for step in range(1, steps + 1):
        write_step(guarded, step)
        if step % interval == 0:
            write_interval(guarded, step)
    guarded.record("evaluation", steps, lambda one: one.evaluation(Progress(step=steps), "valid", 1.0))
    guarded.record("task", steps, lambda one: one.task(Progress(step=steps), Measured()))
    guarded.close()


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("warning: ") for line in capsys.readouterr().err.splitlines()]


def test_a_file_is_tried_again_at_every_record(capsys: pytest.CaptureFixture[str]) -> None:
    file = Fragile({3, 4, 7})
    run(file)
    assert file.recorded == [*(f"{'step' if step else 'start'} {step}" for step in (0, 1, 2, 5, 6, 8)),
                             "evaluation 8", "task 8", "close -1"]  # fmt: skip
    failed = "FILE cannot be written: No space left on device. The run continues without it and retries with every"
    assert warnings(capsys) == [
        f"{failed} record.",
        "FILE works again; records of steps 3 to 4 are missing.",
        f"{failed} record.",
        "FILE works again; records of steps 3 to 7 are missing.",
        "FILE: records of steps 3 to 7 are missing (No space left on device).",
    ]


def test_a_buffered_destination_is_off_and_lacks_what_was_not_flushed(capsys: pytest.CaptureFixture[str]) -> None:
    destination = Fragile({6}, is_buffered=True)
    run(destination)
    assert destination.recorded[-1] == "step 5"  # which was handed over, and not flushed
    assert warnings(capsys) == [
        "FILE cannot be written: No space left on device. The run continues without it until it is restarted.",
        "FILE: records of steps 5 to 8 are missing (No space left on device).",
    ]


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(SystemExit(), "SystemExit"), (ValueError("a  bug\nof theirs."), "a bug of theirs"), (MemoryError(), "MemoryErr")],
)
def test_whatever_a_client_library_raises(
    capsys: pytest.CaptureFixture[str], failure: BaseException, reason: str
) -> None:
    run(Fragile({0, -1}, failure=failure))
    said = warnings(capsys)
    assert f"FILE cannot be written: {reason}" in said[0]
    assert "FILE: records of steps 0 to 0 are missing" in said[-1]


def test_an_interrupt_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Fragile({2}, failure=KeyboardInterrupt()))


def test_a_typed_error_is_shown_by_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    failure = StorageError("a long text that names the file again")
    failure.__cause__ = OSError(122, "Disk quota exceeded")
    run(Fragile({8}, failure=failure))
    assert warnings(capsys)[-1] == "FILE: records of steps 8 to 8 are missing (Disk quota exceeded)."


def test_tensorboard_s_writer_thread_dies_of_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = TensorBoard(str(tmp_path), report_config(tensorboard_queue_size=1), WORKLOAD)
    guarded = Safeguard(board)
    guarded.record("start", 0, lambda one: one.start(Progress(), {}))
    writer = board._writer.file_writer.event_writer._async_writer
    monkeypatch.setattr(threading, "excepthook", lambda failure: None)
    write_step(guarded, 1)
    write_interval(guarded, 1)

    def refuse(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer._writer, "write", refuse)
    for step in (2, 3, 4):
        write_step(guarded, step)
        write_interval(guarded, step)
    guarded.close()
    writer._worker.join()
    said = [line for line in warnings(capsys) if line.startswith("TensorBoard")]
    assert said == [
        f"TensorBoard in {tmp_path} cannot be written: No space left on device. The run continues without it until it "
        "is restarted.",
        f"TensorBoard in {tmp_path}: records of steps 2 to 4 are missing (No space left on device).",
    ]
