"""A progress display: a bar ten times a second, a line as often as wanted."""

from __future__ import annotations

from megatron.files.progress import ProgressDisplay


def test_a_bar_and_lines_come_when_they_are_due() -> None:
    now, lines, drawn = [5.0], [], []
    plain = ProgressDisplay(lines.append, None, 10.0, lambda: now[0])
    bar = ProgressDisplay(lines.append, drawn.append, 10.0, lambda: now[0])
    assert not plain.is_due() and not bar.is_due() and plain.draw_bar is None
    now[0] += 0.125
    assert bar.is_due() and not plain.is_due() and bar.seconds == 0.125
    bar.show("half")
    assert not bar.is_due()
    now[0] += 10.0
    plain.show("done")
    for display in (plain, bar):
        display.clear()
    assert lines == ["done"] and drawn == ["half", ""]
