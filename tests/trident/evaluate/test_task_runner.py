"""Running several tasks: one that fails leaves the others; progress is shown neither too often nor too rarely."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import DataError, PeerLostError
from tests.trident.evaluate.fakes import ByteTokenizer, FakeScorer
from trident.evaluate.task_runner import EvaluationProgress, run_tasks
from trident.evaluate.tasks.lambada import Lambada
from trident.evaluate.tasks.task import TaskOptions


def test_a_task_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"text": "a b"}\n')
    tasks = [Lambada(data=name, folder=tmp_path) for name in ("missing.jsonl", "items.jsonl")]
    (bad, failure), (good, nothing) = run_tasks(tasks, FakeScorer(), ByteTokenizer(), TaskOptions())
    assert bad.result is None and isinstance(failure, DataError) and "missing.jsonl" in (bad.failure or "")
    assert good.result is not None and good.result.count == 1 and nothing is None


def test_a_lost_rank_ends_them_all(tmp_path: Path) -> None:
    class Lost(FakeScorer):
        def score(self, queries, on_progress=None):
            raise PeerLostError("rank 1 is gone")

    (tmp_path / "items.jsonl").write_text('{"text": "a b"}\n')
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        list(run_tasks([Lambada(data="items.jsonl", folder=tmp_path)], Lost(), ByteTokenizer(), TaskOptions()))


def test_the_limit_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"text": "a b"}\n' * 5)
    task = Lambada(data="items.jsonl", folder=tmp_path)
    ((outcome, _),) = run_tasks([task], FakeScorer(), ByteTokenizer(), TaskOptions(), 2, shows_progress=False)
    assert outcome.result is not None and outcome.result.count == 2


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_lines_come_now_and_then_and_say_what_is_left() -> None:
    clock, lines = Clock(), []
    progress = EvaluationProgress("lambada:a", lines.append, clock=clock)
    for done in range(1, 61):
        clock.seconds += 0.5
        progress(done, 120)
    progress.clear()
    assert len(lines) == 3  # after 10, 20 and 30 seconds
    assert lines[0].startswith("lambada:a") and "20/120" in lines[0] and "00:10<00:50" in lines[0]
    assert "60/120" in lines[-1] and "00:30<00:30" in lines[-1]


def test_a_bar_is_redrawn_and_removed() -> None:
    clock, drawn = Clock(), []
    progress = EvaluationProgress("lambada:a", lambda text: None, drawn.append, clock)
    for done in range(1, 6):
        clock.seconds += 0.06
        progress(done, 10)
    progress.clear()
    assert len(drawn) == 3 and "40%" in drawn[1] and drawn[2] == ""
