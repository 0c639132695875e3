"""Runs of many ranks: some relay messages, and ranks that lose their relay connect to the coordinators."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from megatron.parallel.joining import open_mesh, rendezvous
from megatron.parallel.watch import opening
from megatron.parallel.watch.limits import WatchLimits
from megatron.parallel.watch.peers import NEAR, parents_of
from megatron.train.watchdog import Watch
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks


@pytest.mark.parametrize(("ranks", "of_node"), [(8, 4), (9, 9), (64, 8), (4096, 8), (16384, 8), (16384, 4)])
def test_no_rank_has_many_connections(ranks: int, of_node: int) -> None:
    coordinators = (0, of_node if ranks > of_node else 1)
    parents = parents_of([rank // of_node for rank in range(ranks)], coordinators)
    direct = [rank for rank, parent in enumerate(parents) if parent is None]
    if ranks <= NEAR:
        assert len(direct) == ranks
    assert len(direct) <= NEAR + 1 and set(coordinators) <= set(direct)
    children = [parents.count(rank) for rank in {parent for parent in parents if parent is not None}]
    assert max(children, default=0) + NEAR + 1 <= 40
    for rank in (ranks - 1, ranks // 2):
        steps = 0
        while (above := parents[rank]) is not None:
            rank, steps = above, steps + 1
        assert steps <= 5


def pass_on(rank: int) -> dict[str, Any]:
    """Three nodes of three ranks, one of which passes on what the others send; that of the last one dies."""
    mesh = open_mesh(Layout())
    opening.network_namespace = lambda: f"net {rank // 3}"
    opening.parents_of = lambda places, coordinators: parents_of(places, coordinators, 3)  # type: ignore[misc]
    watch = Watch()
    watch.open(mesh, rendezvous(), WatchLimits(20, 40))
    channel = watch._channel
    assert channel is not None
    found: dict[str, Any] = {"links": len(channel._links), "answers": watch.peers_answer()}
    dist.barrier()
    if rank == 0:
        found["heard"] = [entry["rank"] for entry in watch.ranks() if entry["heard_seconds"] < 15]
    dist.barrier()
    if rank == 6:
        for link in channel._links:
            link.connection.send({"kind": "bye"})  # the run does not end, so that the others can be looked at
        time.sleep(0.5)
        watch._channel = None
        channel._watched.position = None  # type: ignore[assignment,method-assign]  # its thread dies
        channel._wake()
    dist.barrier()
    if rank in (7, 8):
        until = time.monotonic() + 60
        while len(channel._links) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        found["links after"] = len(channel._links)
        found["answers after"] = channel.count_silent()
    dist.barrier()
    with watch:
        pass
    return found


@pytest.mark.full
def test_whoever_loses_the_rank_in_between_reaches_the_hubs_without_it() -> None:
    results = run_ranks(pass_on, 9)
    assert [found["links"] for found in results] == [1, 1, 1, 1, 1, 1, 2, 1, 1]
    assert all(found["answers"] for found in results)
    assert results[0]["heard"] == list(range(9))
    for found in results[7:]:
        assert (found["links after"], found["answers after"]) == (3, 0)
