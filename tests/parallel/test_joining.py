"""Joining a run: an open mesh and messages over it, one process without a rendezvous, and what stops a rank."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron.errors import HangError, LaunchError
from megatron.parallel import joining, messages
from megatron.parallel.joining import RollCall, close_mesh, open_mesh
from megatron.parallel.launchers import Ranks
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.layouts import Layout
from tests.helpers.ranks import LAUNCH_VARIABLES, run_ranks


def _describe(rank: int, tp: int, pp: int) -> dict[str, Any]:
    mesh = open_mesh(Layout(tp, pp))
    total = messages.all_reduce_sum(torch.tensor([float(rank)]), mesh.dp)
    words = messages.all_gather_json({"rank": rank, "pad": "x" * rank}, mesh.tp)
    told = messages.broadcast_json({"from": rank}, mesh.world, source=mesh.world.size - 1)
    largest = messages.all_reduce_max(torch.tensor([rank]), mesh.world)
    copied = messages.broadcast(torch.tensor([rank]), mesh.pp, source=mesh.pp.size - 1)
    timeouts = {axis.group._get_backend(torch.device("cpu")).options._timeout for axis in (mesh.world, *mesh.axes)}
    return {
        "place": (mesh.pp.rank, mesh.dp.rank, mesh.tp.rank),
        "sizes": (mesh.pp.size, mesh.dp.size, mesh.tp.size),
        "dp_sum": total.item(),
        "tp_ranks": [word["rank"] for word in words],
        "told": told,
        "largest": largest.item(),
        "copied": copied.item(),
        "timeouts": timeouts,
    }


def test_four_ranks_in_deepspeed_order() -> None:
    results = run_ranks(_describe, 4, 2, 2)
    for rank, result in enumerate(results):
        pp, dp, tp = result["place"]
        assert result["sizes"] == (2, 1, 2)
        assert rank == (pp * 1 + dp) * 2 + tp
        assert result["tp_ranks"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert result["told"] == {"from": 3}
        assert result["largest"] == 3
        assert result["copied"] == 2 + rank % 2
        assert result["dp_sum"] == rank
        assert result["timeouts"] == {timedelta(minutes=2)}


def _meet_again(rank: int) -> list[float]:
    sums, stores = [], []
    for _ in range(2):
        mesh = open_mesh(Layout())
        stores.append(torch.distributed.distributed_c10d._get_default_store())  # it lives on, as under torchrun
        sums.append(messages.all_reduce_sum(torch.tensor([rank + 1.0]), mesh.world).item())
        close_mesh(mesh)
    return sums


def test_the_same_processes_open_a_second_mesh() -> None:
    assert run_ranks(_meet_again, 2, timeout_seconds=120) == [[3.0, 3.0]] * 2


def _no_rendezvous(*_: object, **__: object) -> None:
    raise AssertionError("a single process looks for others")


def _alone(rank: int) -> tuple[int, int]:
    for name in LAUNCH_VARIABLES:
        os.environ.pop(name, None)
    torch.distributed.rendezvous = torch.distributed.distributed_c10d.rendezvous = _no_rendezvous
    mesh = open_mesh(Layout())
    size = torch.distributed.get_world_size(mesh.dp.group)
    close_mesh(mesh)
    assert not torch.distributed.is_initialized()
    return mesh.world.size, size


def test_plain_python_opens_a_mesh_of_one_without_a_rendezvous() -> None:
    assert run_ranks(_alone, 1) == [(1, 1)]


def test_closing_a_mesh_without_process_groups_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining.dist, "destroy_process_group", _no_rendezvous)
    close_mesh(ParallelMesh.single())


def test_an_unknown_host_in_a_node_list_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(joining.time, "sleep", waits.append)
    ranks = Ranks(1, 4, 0, "node001.invalid", 12345, "srun")
    calling = RollCall(1, 4, "node001.invalid:12345", 60.0)
    with pytest.raises(LaunchError, match=r"Rank 1 of 4 cannot look up 'node001\.invalid'.*Set MASTER_ADDR"):
        joining._join(ranks, "gloo", timedelta(minutes=1), calling)
    assert waits == [1, 1]


def _wait_for_nobody(rank: int) -> str:
    if rank == 2:
        return ""
    joining.timedelta = lambda minutes: timedelta(seconds=2)  # type: ignore[assignment, misc]
    with pytest.raises(HangError) as refused:
        open_mesh(Layout())
    return str(refused.value)


def test_a_rank_that_never_joins_is_named_after_the_timeout() -> None:
    texts = run_ranks(_wait_for_nobody, 3)
    for text in texts[:2]:
        assert text.startswith("rank 2 has not joined the other ranks of 3 at 127.0.0.1:")
        assert "within 2 s (--distributed-timeout-minutes): stopped, dead or cut off." in text
