"""The mesh: order of ranks, groups, messages over them, and layouts that do not fit."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron.errors import LaunchError
from megatron.parallel import mesh as mesh_module
from megatron.parallel import messages
from megatron.parallel.launchers import Ranks
from megatron.parallel.mesh import ParallelMesh, axis_ranks, check_layout, close_mesh, open_mesh
from tests.helpers.ranks import RankFailure, run_ranks


@dataclass(frozen=True)
class Layout:
    """The part of ParallelConfig that the mesh reads."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    distributed_backend: str | None = None
    distributed_timeout_minutes: int = 2
    local_rank: int | None = None


def _describe(rank: int, tp: int, pp: int) -> dict[str, Any]:
    mesh = open_mesh(Layout(tp, pp))
    total = messages.all_reduce_sum(torch.tensor([float(rank)]), mesh.dp)
    words = messages.gather_json({"rank": rank, "pad": "x" * rank}, mesh.tp)
    told = messages.broadcast_json({"from": rank}, mesh.world, source=mesh.world.size - 1)
    largest = messages.all_reduce_max(torch.tensor([rank]), mesh.world)
    copied = messages.broadcast(torch.tensor([rank]), mesh.pp, source=mesh.pp.size - 1)
    messages.barrier(mesh.world)
    return {
        "place": (mesh.pp.rank, mesh.dp.rank, mesh.tp.rank),
        "sizes": (mesh.pp.size, mesh.dp.size, mesh.tp.size),
        "dp_sum": total.item(),
        "tp_ranks": [word["rank"] for word in words],
        "told": told,
        "any": messages.any_true(rank == 1, mesh.world),
        "all": messages.all_true(rank == 1, mesh.world),
        "largest": largest.item(),
        "copied": copied.item(),
        "ends": (mesh.is_first_stage, mesh.is_last_stage),
    }


def test_four_ranks_in_deepspeed_order() -> None:
    results = run_ranks(_describe, 4, 2, 2)
    for rank, result in enumerate(results):
        pp, dp, tp = result["place"]
        assert result["sizes"] == (2, 1, 2)
        assert rank == (pp * 1 + dp) * 2 + tp
        assert result["tp_ranks"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert result["told"] == {"from": 3}
        assert result["any"] is True and result["all"] is False
        assert result["largest"] == 3
        assert result["copied"] == 2 + rank % 2
        assert result["ends"] == (pp == 0, pp == 1)
        assert result["dp_sum"] == rank


def test_groups_partition_the_world_on_every_axis() -> None:
    for groups in axis_ranks(24, 2, 3).values():
        assert sorted(rank for group in groups for rank in group) == list(range(24))
    assert axis_ranks(8, 2, 2)["dp"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert axis_ranks(8, 2, 2)["pp"] == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("world", "tp", "pp", "words"),
    [(6, 4, 1, "start 4 or 8 processes"), (2, 2, 2, "start 4 processes"), (3, 2, 1, "3 processes cannot hold")],
)
def test_layout_that_does_not_fit_names_the_legal_ones(world: int, tp: int, pp: int, words: str) -> None:
    with pytest.raises(LaunchError, match=words) as failure:
        check_layout(world, tp, pp)
    assert f"--tensor-model-parallel-size {tp}" in str(failure.value)
    assert "1 x 1" in str(failure.value)


def _alone(rank: int) -> tuple[int, int, float]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    before = time.perf_counter()
    mesh = open_mesh(Layout())
    spent = time.perf_counter() - before
    messages.barrier(mesh.world)
    size = torch.distributed.get_world_size(mesh.dp.group)
    close_mesh(mesh)
    assert not torch.distributed.is_initialized()
    return mesh.world.size, size, spent


def test_plain_python_opens_a_mesh_of_one_without_a_rendezvous() -> None:
    ((world, size, seconds),) = run_ranks(_alone, 1)
    assert (world, size) == (1, 1)
    assert seconds < 2


def test_single_mesh_needs_no_process_group() -> None:
    mesh = ParallelMesh.single()
    assert mesh.is_first_stage and mesh.is_last_stage
    assert messages.gather_json((1, 2), mesh.world) == [[1, 2]]
    assert messages.broadcast_json("a", mesh.tp) == "a"
    assert messages.any_true(True, mesh.dp) and not messages.all_true(False, mesh.dp)
    close_mesh(mesh)


def test_lost_launcher_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([4711, 1, 1])
    monkeypatch.setattr(mesh_module.os, "getppid", lambda: next(answers))
    monkeypatch.setattr(mesh_module.ctypes, "CDLL", lambda *_, **__: type("C", (), {"prctl": lambda *_: 0})())
    with pytest.raises(LaunchError, match="its parent process was 4711 and is now 1"):
        mesh_module.die_with_launcher()


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


def test_unknown_host_from_a_node_list_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(mesh_module.time, "sleep", waits.append)
    ranks = Ranks(1, 4, 0, "node001.invalid", 12345, "srun")
    with pytest.raises(LaunchError, match=r"Rank 1 of 4 cannot look up 'node001\.invalid'.*Set MASTER_ADDR"):
        mesh_module._join(ranks, "gloo", timedelta(minutes=1))
    assert waits == [1, 1]
