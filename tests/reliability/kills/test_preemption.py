"""SIGTERM at any moment of a run loses no step; a sample of the campaign in `preemption.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.kills.preemption import campaign

pytestmark = pytest.mark.slow


def test_sigterm_at_random_moments_loses_no_step(tmp_path: Path) -> None:
    found = campaign(tmp_path, 2, seed=3)
    assert [outcome.problem for outcome in found] == [""] * 2
