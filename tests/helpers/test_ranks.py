"""The helper that starts ranks: it shows the failure that came first, and ranks that do not finish."""

from __future__ import annotations

import os
import time

import pytest

from tests.helpers.ranks import RankFailure, run_ranks


def _fails_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError(f"rank {rank} broke")
    time.sleep(60)


def _dies_on_zero(rank: int) -> None:
    if rank == 0:
        os._exit(3)
    time.sleep(60)


def _sleeps(rank: int) -> None:
    time.sleep(60)


def test_run_ranks_shows_the_first_failure() -> None:
    with pytest.raises(RankFailure, match="rank 1 broke"):
        run_ranks(_fails_on_one, 2)
    with pytest.raises(RankFailure, match="rank 0 ended without a word"):
        run_ranks(_dies_on_zero, 2)
    with pytest.raises(RankFailure, match="not finished after 1 s(.|\n)*in _sleeps"):
        run_ranks(_sleeps, 1, timeout_seconds=1)
