"""The tree of ranks: who is connected to whom, what the calls return, and how the loss of a rank spreads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron.parallel.messages import is_lost_peer
from megatron.parallel.rank_tree import FANOUT, RankTree, children_of, parent_of
from megatron.parallel.tree_opening import open_trees


def test_every_rank_has_one_parent_and_few_connections() -> None:
    size = 16_384
    parents = {child: rank for rank in range(size) for child in children_of(rank, size)}
    assert parents == {rank: parent_of(rank) for rank in range(1, size)}
    assert max(len(children_of(rank, size)) for rank in range(size)) == FANOUT == 8
    hops, rank = 0, size - 1
    while rank:
        rank, hops = parent_of(rank), hops + 1
    assert hops == 5


LIMIT_SECONDS = 60.0  # 80 threads on a machine with other work


def on_all(trees: list[RankTree], call: Callable[[int, RankTree], Any]) -> list[Any]:
    """What each rank gets or raises, in a thread each."""
    results: list[Any] = [None] * len(trees)

    def run(rank: int) -> None:
        try:
            results[rank] = call(rank, trees[rank])
        except Exception as failure:
            results[rank] = failure

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(trees))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * LIMIT_SECONDS)
    return results


@pytest.fixture
def trees(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[RankTree]:
    """Connected trees of 80 ranks in this process; the parameter is their limit in seconds."""
    limit_seconds = getattr(request, "param", 3.0)
    monkeypatch.setattr(socket.socket, "setsockopt", lambda *_: None)  # pairs are no TCP connections
    above: dict[int, socket.socket] = {}
    below: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(80)}
    for rank in range(1, 80):
        above[rank], below[parent_of(rank)][rank] = socket.socketpair()
    return [RankTree(rank, 80, above.get(rank), below[rank], limit_seconds) for rank in range(80)]


@pytest.mark.parametrize("trees", [LIMIT_SECONDS], indirect=True)
def test_all_ranks_get_the_same(trees: list[RankTree]) -> None:
    def calls(rank: int, tree: RankTree) -> list[Any]:
        pending = [tree.start_maximum(np.array([rank * (-1) ** turn])) for turn in range(4)]
        return [
            tree.total(np.array([[rank], [1]])).tolist(),
            tree.maximum(np.array(rank + 0.5)).item(),
            [tree.broadcast(f"from {rank}".encode(), source) for source in (0, 3, 8, 79)],
            tree.broadcast(b""),
            [int(future.result()[0]) for future in pending],
            type(tree.total(np.array(1))),
            tree.gather(bytes([rank]) * rank),
        ]

    results = on_all(trees, calls)
    assert results[0].pop() == [bytes([rank]) * rank for rank in range(80)]
    assert [result.pop() for result in results[1:]] == [None] * 79
    told = [b"from 0", b"from 3", b"from 8", b"from 79"]
    assert results == [[[[3160], [80]], 79.5, told, b"", [79, 0, 79, 0], np.ndarray]] * 80


def test_the_first_host_may_know_its_own_name_as_a_loopback_address() -> None:
    store, limit = dist.HashStore(), timedelta(seconds=LIMIT_SECONDS)
    opened: list[list[RankTree]] = [
        [] for _ in range(10)
    ]  # rank 9 is connected to rank 1, which gives the name as well

    def join(rank: int) -> None:
        opened[rank] = open_trees(store, rank, 10, "127.0.1.1", [limit], limit)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * LIMIT_SECONDS)
    trees = [tree for (tree,) in opened]
    try:
        totals = on_all(trees, lambda rank, tree: tree.total(np.array(rank)).item())
        assert totals == [45] * 10
        assert store.get("address1").startswith(b"127.0.1.1 ")
    finally:
        for tree in trees:
            tree.close()


@pytest.mark.parametrize("trees", [LIMIT_SECONDS], indirect=True)
def test_the_loss_of_a_rank_spreads_to_all(trees: list[RankTree]) -> None:
    def lose(rank: int, tree: RankTree) -> Any:
        if rank == 70:
            return tree.close()
        return tree.maximum(np.array(rank))

    results = on_all(trees, lose)
    assert not any("Timed out" in str(failure) for failure in results)
    assert all(is_lost_peer(failure) for rank, failure in enumerate(results) if rank != 70)
    assert "Connection closed by peer: rank 70" in str(results[parent_of(70)])


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_limit(trees: list[RankTree]) -> None:
    results = on_all(trees, lambda rank, tree: None if rank == 9 else tree.total(np.array(rank)))
    assert isinstance(results[1], dist.DistNetworkError)
    assert "Timed out waiting 3000ms for rank" in str(results[1]) and is_lost_peer(results[1])


def test_ranks_in_different_calls_are_told(trees: list[RankTree]) -> None:
    def differ(rank: int, tree: RankTree) -> Any:
        return tree.gather(b"a") if rank == 1 else tree.total(np.zeros(2 if rank == 2 else 1))

    results = on_all(trees, differ)
    assert "The ranks do not make the same calls: rank " in str(results[1])
