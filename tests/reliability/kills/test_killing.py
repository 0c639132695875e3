"""SIGKILL at any moment of a run that saves in the background loses nothing: a sample of what `killing.py` tries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.kills.killing import campaign

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc to see the ranks"),
]


def test_kills_at_random_moments_and_operations_lose_nothing(tmp_path: Path) -> None:
    found = campaign(tmp_path, 4, seed=5, layouts=("one", "tp2", "dp2-zero2", "ep2"))
    assert [outcome.problem for outcome in found] == [""] * 4
    assert any(outcome.has_died for outcome in found)
