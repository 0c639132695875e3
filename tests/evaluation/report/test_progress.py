"""The progress of an evaluation: a bar on a terminal, lines elsewhere, neither too often."""

from __future__ import annotations

from megatron.evaluation.report.progress import EvaluationProgress


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
    assert len(drawn) == 3 and all(text.startswith("\r") and text.endswith("\x1b[K") for text in drawn)
    assert "40%" in drawn[1] and drawn[2] == "\r\x1b[K"
