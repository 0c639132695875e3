"""The helper that starts ranks: it shows the failure that came first, and ranks that do not finish."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from tests.helpers.ranks import RankFailure, free_port, run_ranks


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


@pytest.mark.full
def test_run_ranks_shows_the_first_failure() -> None:
    with pytest.raises(RankFailure, match="rank 1 broke"):
        run_ranks(_fails_on_one, 2)
    with pytest.raises(RankFailure, match="rank 0 ended without a word"):
        run_ranks(_dies_on_zero, 2)
    with pytest.raises(RankFailure, match="not finished after 1 s(.|\n)*in _sleeps"):
        run_ranks(_sleeps, 1, timeout_seconds=1)


def test_a_free_port_is_none_that_the_system_gives_to_others() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()
    settings = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if settings.exists():
        first, last = map(int, settings.read_text().split())
        assert not any(first <= port <= last for port in ports)
