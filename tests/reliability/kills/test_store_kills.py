"""A run is killed at a request to an object store.

By hand, 40 kills: `python -m tests.reliability.kills.store_kills --cases 40`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.kills.store_kills import run

pytestmark = pytest.mark.slow


def test_a_run_that_is_killed_leaves_whole_copies_and_continues_from_them(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    for name in ("s3fs", "moto.server"):
        pytest.importorskip(name)
    campaign = run(tmp_path, max(1, pytestconfig.getoption("--cases") // 400), pytestconfig.getoption("--fuzz-seed"))
    assert campaign.failures == [] and campaign.kills and campaign.without_disk
