"""Tools that make files are killed by SIGKILL at their file operations; the same command again has the same result.

By hand, 20 kills of each: `python -m tests.reliability.kills.tool_kills --cases 20`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.reliability.kills.tool_kills import TOOLS, half_made, run_in_rank

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="descriptors are followed through /proc"),
]


def test_a_killed_tool_leaves_nothing_half_made_and_its_rerun_is_as_if_it_had_not_been_killed(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    cases = max(1, pytestconfig.getoption("--cases") // 400)
    seed = pytestconfig.getoption("--fuzz-seed")
    # In another process: one that has run tests has threads, and what libraries keep for them does not survive a fork.
    campaign = run_ranks(run_in_rank, 1, tmp_path.resolve(), cases, seed, timeout_seconds=600)[0]
    assert campaign.failures == []
    assert set(campaign.kills) == set(TOOLS) and all(campaign.kills.values())


def test_what_is_half_made_or_lost_is_noticed() -> None:
    before, after = {"kept": b"1", "old": b"2"}, {"kept": b"1", "made/a": b"3", "made/b": b"4"}
    assert half_made({"kept": b"1", ".made.tmp/a": b""}, before, after, 1) == ""
    assert half_made({"kept": b"1", "made/a": b"3"}, before, after, 1) == "made is visible and half made: ['made/a']"
    assert half_made({"old": b"2"}, before, after, 1) == "['kept'] were there before and are not intact"
