"""Opening the trees of ranks: who is let in, what happens to ranks that do not come, and how many sockets are open."""

from __future__ import annotations

import math
import queue
import socket
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from benchmarks.sockets import counted_sockets
from megatron.parallel import joining, tree_opening
from megatron.parallel.rank_tree import RankTree, children_of
from megatron.parallel.tree_opening import LOOPBACK, address_family, address_towards, open_trees
from tests.helpers.ranks import run_ranks

LIMITS = (timedelta(seconds=60), timedelta(hours=1))


def test_strangers_are_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks in threads; before rank 2 connects, somebody else does, with a wrong secret."""
    store = dist.HashStore()
    monkeypatch.setattr(tree_opening, "_HELLO_SECONDS", 0.5)
    trees: dict[int, list[RankTree]] = {}

    def join(rank: int) -> None:
        if rank == 2:
            port = int(store.get("address0").decode().rpartition(" ")[2])
            for content in (b"x", b"?" * tree_opening._HELLO.size):
                with socket.create_connection((LOOPBACK, port)) as stranger:
                    stranger.sendall(content)
        trees[rank] = open_trees(store, rank, 3, LOOPBACK, LIMITS, timedelta(seconds=60))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    sums: dict[int, Any] = {}

    def add(rank: int, number: int) -> None:
        sums[rank] = trees[rank][number].total(np.array(rank)).item()
        trees[rank][number].close()

    for number in (1, 0):
        threads = [threading.Thread(target=add, args=(rank, number)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sums == {0: 3, 1: 3, 2: 3}
        sums.clear()


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(dist.DistNetworkError, match=r"timed out waiting for ranks \[1, 2\] to connect"):
        open_trees(dist.HashStore(), 0, 3, LOOPBACK, LIMITS, timedelta(seconds=0.3))


def test_a_parent_that_cannot_be_reached_is_named() -> None:
    store = dist.HashStore()
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))  # nobody listens
        port = taken.getsockname()[1]
        store.set("address1", f"{LOOPBACK} {port}")
        store.set("token", "a" * 32)
        with pytest.raises(dist.DistNetworkError, match=rf"rank 1 cannot be reached at 127.0.0.1:{port}: .*refused"):
            open_trees(store, 9, 10, LOOPBACK, LIMITS, timedelta(seconds=5))


def test_the_address_on_the_way_to_a_host() -> None:
    assert address_towards(LOOPBACK, 9) == LOOPBACK
    assert address_towards("no-such-host.invalid", 9) == LOOPBACK
    assert address_family("::1") == socket.AF_INET6 and address_family(LOOPBACK) == socket.AF_INET


def _opened(rank: int, size: int) -> dict[str, int]:
    answers: Any = queue.Queue()
    counted_sockets(rank, answers)
    counts: dict[str, int] = answers.get()[1]
    return counts


def test_a_rank_has_a_socket_for_few_others() -> None:
    """Two trees, the store and the hubs of the watch, and of gloo's groups the neighbours that messages go to."""
    size = 6
    counts = run_ranks(_opened, size, size)
    for rank, opened in enumerate(counts):
        in_trees = 2 * (len(children_of(rank, size)) + (rank > 0))
        of_store = joining._CONNECTIONS_PER_RANK * (size if rank == 0 else 1)
        late = max(0, opened["control_and_background_messages"])  # accepted after the others had counted theirs
        assert opened["joining"] > 0 and opened["joining"] + late <= in_trees + of_store
        assert 0 < opened["gradients_over_gloo"] <= 1 + math.ceil(math.log2(size))
        assert 0 < opened["watch"] <= (size + 1 if rank in (0, 1) else 2)
