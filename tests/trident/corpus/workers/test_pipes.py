"""Waiting for workers that do not answer."""

from __future__ import annotations

import os
import sys

import pytest

from trident.corpus.workers import pipes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read from /proc")


def test_stalls_are_reported_at_growing_intervals_with_a_likely_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    waited: list[float] = []
    monkeypatch.setattr(pipes.log, "warning", heard.append)

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) == 4

    assert pipes.wait_for(wait, [("worker 1", os.getpid()), ("worker 2", None)])
    assert waited == [60, 60, 120, 240]
    assert len(heard) == 6 and heard[0].startswith("worker 1 has not responded for 60 seconds. It may be busy")
    assert [text.split()[6] for text in heard] == ["60", "60", "120", "120", "240", "240"]
