"""The progress line on a terminal and elsewhere."""

from __future__ import annotations

import time

import pytest

from trident.corpus.workers.progress_line import ProgressLine


def test_progress_on_a_terminal_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines: list[str] = []
    bars: list[str] = []
    plain, bar = ProgressLine(100, 10, lines.append), ProgressLine(100, 10, lines.append, bars.append)
    for _ in range(5):
        now[0] += 2.0
        plain.advance(10, 2_000_000, 10)
        bar.advance(10, 2_000_000, 10)
    assert lines[-1] == "Processed 50 documents (5.0 docs/s, 1.00 MB/s)." and len(lines) == 5
    assert "50%" in bars[-1] and "ETA 0:10" in bars[-1] and "1.0 MB/s" in bars[-1]
    unknown = ProgressLine(None, 10, lines.append, bars.append)
    now[0] += 2.0
    unknown.advance(5, 10_000_000, 0)
    assert "ETA" not in bars[-1] and "10 MB" in bars[-1]
    unknown.finish()
    assert lines[-1].startswith("Processed 5 documents")
