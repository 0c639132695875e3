"""Messages over an axis: every function on several ranks, on one, and what a lost rank looks like."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.device import Stopwatch
from megatron.errors import PeerLostError
from megatron.kernels.attention.partial import PartialAttention
from megatron.parallel import messages
from megatron.parallel.expert.exchange import RowExchange
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.sequence.ring import RingPlan
from megatron.parallel.sequence.tiles import Visibility
from megatron.parallel.tensor.collectives import start_gathering
from megatron.parallel.watch.stacks import read_stacks
from tests.helpers.layouts import Layout
from tests.helpers.machines.message_sizes import count_messages
from tests.helpers.ranks import run_ranks

AXIS = ParallelMesh.single().control


def exchange(rank: int, folder: Path) -> dict[str, Any]:
    """Everything once, on the world of four and on the tensor axis of two."""
    mesh = open_mesh(Layout(2, 1))
    last = mesh.world.size - 1
    with count_messages() as sizes:
        gathered = messages.gather_bytes(bytes([rank]) * rank, mesh.world)
        in_tree = messages.gather_bytes(bytes([rank]) * rank, mesh.control)
    assert gathered == in_tree
    return {
        "sum": messages.all_reduce_sum(torch.tensor([rank, 1]), mesh.world).tolist(),
        "max": messages.all_reduce_max(torch.tensor([rank, -rank]), mesh.tp).tolist(),
        "broadcast": messages.broadcast(torch.tensor([rank]), mesh.tp, source=1).item(),
        "bytes": messages.broadcast_bytes(bytes([0, 255, rank]), mesh.world, source=last),
        "no bytes": messages.broadcast_bytes(b"" if rank == 1 else b"ignored", mesh.world, source=1),
        "json": messages.broadcast_json({"rank": (rank, "é")}, mesh.tp, source=1),
        "gathered": gathered,
        "sizes": (sizes.sent_bytes, sizes.received_bytes),
        "all": messages.all_gather_json({"rank": rank, "pad": "x" * rank}, mesh.tp),
        "swapped": swap(torch.full((3,), float(rank)), mesh.tp),
        "waits": [is_seen_to_wait(begin, mesh.tp, folder / f"{rank // 2}-{n}") for n, begin in enumerate(BEGUN)],
        "received": pass_on(torch.tensor([[rank + 0.5]], dtype=torch.bfloat16), mesh.tp).item(),
    }


def swap(tensor: torch.Tensor, axis: Axis) -> list[float]:
    """What the other rank of the axis sends, twice, begun before either waits; with the time that it took."""
    watch = Stopwatch()
    watch.start()
    axis, other = dataclasses.replace(axis, stopwatch=watch), 1 - axis.rank
    sent = [messages.start_send(tensor + step, axis, other) for step in (0.25, 0.5)]
    arriving = [messages.start_receive(torch.empty(3), axis, other) for _ in range(2)]
    values = [float(message.wait()[0]) for message in arriving]
    assert all(message.has_arrived for message in arriving)
    for message in sent:
        message.wait()
    assert [kind for kind, *_ in watch.take().parts] == [messages.TRANSFER] * 4
    return values


def pass_on(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """What rank 1 of the axis got from rank 0; on rank 0 its own."""
    if axis.rank == 0:
        messages.send(tensor.expand(2, 2), axis, 1)
        return tensor
    return messages.receive(torch.empty(2, 2, dtype=tensor.dtype), axis, 0)[1, 1]


def ring_message(axis: Axis) -> Callable[[], object]:
    plan = RingPlan(axis, PartialAttention(1.0), Visibility(), (), None)
    return plan.rotate(torch.zeros(2)).wait


def expert_rows(axis: Axis) -> Callable[[], object]:
    rows = RowExchange(axis)
    rows.begin(torch.zeros(2, 1))
    return rows.finish


# What begins a message, and returns what waits for it.
BEGUN: Sequence[Callable[[Axis], Callable[[], object]]] = (
    ring_message,
    lambda axis: start_gathering(torch.zeros(1, 2, 1), axis).wait,
    expert_rows,
)


def is_seen_to_wait(begin: Callable[[Axis], Callable[[], object]], axis: Axis, was_looked_at: Path) -> bool:
    """Whether the watcher sees that the first rank waits, until when the other one does not take part."""
    seen: list[bool] = []

    def look() -> None:
        time.sleep(0.05)  # until the main thread is where it waits
        deadline = time.monotonic() + 120
        while not any(seen) and time.monotonic() < deadline:
            seen.append(read_stacks(1000)[1])
            time.sleep(0.01)
        was_looked_at.touch()

    while axis.rank == 1 and not was_looked_at.exists():
        time.sleep(0.01)
    wait = begin(axis)
    if axis.rank == 0:
        threading.Thread(target=look).start()
    wait()
    return axis.rank == 1 or any(seen)


def test_four_ranks_exchange(tmp_path: Path) -> None:
    results = run_ranks(exchange, 4, tmp_path)
    for rank, met in enumerate(results):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert met["sum"] == [6, 4]
        assert met["max"] == [pair[1], -pair[0]]
        assert met["broadcast"] == pair[1]
        assert met["bytes"] == b"\x00\xff\x03"
        assert met["no bytes"] == b""
        assert met["received"] == pair[0] + 0.5
        assert met["waits"] == [True] * len(BEGUN)
        assert met["swapped"] == [pair[0] + pair[1] - rank + 0.25, pair[0] + pair[1] - rank + 0.5]
        assert met["json"] == {"rank": [pair[1], "é"]}
        assert met["all"] == [{"rank": member, "pad": "x" * member} for member in pair]
        if rank:
            assert met["gathered"] is None
            assert met["sizes"] == (8 + 3 + rank, 4 * 8)
    assert results[0]["gathered"] == [b"", b"\x01", b"\x02\x02", b"\x03\x03\x03"]
    assert results[0]["sizes"] == (8 + 3, 4 * 8 + 4 * 3 + (1 + 2 + 3))


def test_an_axis_of_one_needs_no_process_group() -> None:
    tensor = torch.tensor([3])
    assert messages.all_reduce_sum(tensor, AXIS) is tensor
    assert messages.all_reduce_max(tensor, AXIS) is tensor
    assert messages.broadcast(tensor, AXIS) is tensor
    assert messages.broadcast_bytes(b"a", AXIS) == b"a"
    assert messages.gather_bytes(b"a", AXIS) == [b"a"]
    assert messages.broadcast_json((1, "a"), AXIS) == [1, "a"]
    assert messages.all_gather_json((1, "a"), AXIS) == [[1, "a"]]


@pytest.mark.parametrize(
    ("failure", "is_lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"), True),
        (RuntimeError("recv: Connection reset by peer"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation"), True),
        (RuntimeError("[gloo/transport/tcp/pair.h:311] Connect timeout [none]"), True),
        (dist.DistNetworkError("unreachable"), True),
        (PeerLostError("another rank has ended"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_lost_rank_is_distinguished_from_other_failures(failure: BaseException, is_lost: bool) -> None:
    assert messages.is_lost_peer(failure) is is_lost
