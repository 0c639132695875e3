"""Ranks agree on success or failure, results are sent only where needed, and messages stay small."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from megatron.errors import CheckpointError, ConfigError, DamagedError, DataError, MegatronError, StorageError
from megatron.parallel.agreement import gather_on_first, is_same_on_all, run_on_all, run_on_first
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.layouts import Layout
from tests.helpers.machines.message_sizes import MessageSizes, count_messages
from tests.helpers.ranks import run_ranks

SINGLE = ParallelMesh.single()
REASONS: list[Callable[[str], Exception]] = [
    DataError, ConfigError, CheckpointError, StorageError, DamagedError, ValueError
]  # fmt: skip

PAIRS = list(itertools.permutations(REASONS[:5], 2))


def raiser(failure: Exception | None) -> Callable[[], str]:
    def work() -> str:
        if failure is not None:
            raise failure
        return "done"

    return work


def caught(call: Callable[..., Any], *arguments: Any) -> tuple[str, str]:
    with pytest.raises(Exception) as failure:
        call(*arguments)
    return type(failure.value).__name__, str(failure.value)


def agree(rank: int) -> dict[str, Any]:
    mesh = open_mesh(Layout())
    size = mesh.control.size
    met: dict[str, Any] = {
        "own": run_on_all(mesh, lambda: {rank}),  # need not be JSON: it travels nowhere
        "gathered": gather_on_first(mesh, lambda: ["x" * rank, None] if rank % 2 else None),
        "first": run_on_first(mesh, lambda: [rank, "é"]),
        "same": is_same_on_all(mesh, b"\x00\xff\x80"),
        "not same": is_same_on_all(mesh, bytes([0, 255, rank])),
    }
    for reason in REASONS:
        work = raiser(reason(f"bad {rank}") if rank == 1 else None)
        met[reason.__name__] = [caught(call, mesh, work) for call in (run_on_all, gather_on_first)]
    met["pairs"] = []
    for low, high in PAIRS:
        work = raiser({0: low("bad"), 2: high("bad")}.get(rank))
        met["pairs"].append(caught(run_on_all, mesh, work))
    met["equals"] = caught(run_on_all, mesh, raiser(DataError(f"bad {rank}") if rank else None))
    met["first fails"] = caught(run_on_first, mesh, raiser(StorageError("full") if rank == 0 else None))
    met["others fail"] = run_on_first(mesh, raiser(StorageError("full") if rank == size - 1 else None))
    met["not JSON"] = caught(gather_on_first, mesh, lambda: {1} if rank == 2 else 1)
    met["after all that"] = run_on_first(mesh, lambda: rank)
    return met


@pytest.fixture(scope="module")
def agreed() -> list[dict[str, Any]]:
    """What each of three ranks met."""
    return run_ranks(agree, 3)


def test_three_ranks_agree(agreed: list[dict[str, Any]]) -> None:
    first, second, third = agreed
    for rank, met in enumerate((first, second, third)):
        assert met["own"] == {rank}
        assert met["first"] == [0, "é"]
        assert (met["same"], met["not same"]) == (True, False)
        assert met["after all that"] == 0
        assert met["others fail"] == "done"
        prefix = "" if rank == 0 else "rank 0: "
        assert met["first fails"] == ("StorageError", prefix + "full")
    assert first["gathered"] == [None, ["x", None], None]
    assert second["gathered"] is None and third["gathered"] is None
    for reason in REASONS:
        name = reason.__name__
        elsewhere = (
            ("CheckpointError", "rank 1: ValueError: bad 1") if name == "ValueError" else (name, "rank 1: bad 1")
        )
        assert second[name] == [(name, "bad 1")] * 2
        assert first[name] == third[name] == [elsewhere] * 2
    assert first["equals"] == ("DataError", "rank 1: bad 1")
    assert second["equals"] == ("DataError", "bad 1")
    assert first["not JSON"][0] == "CheckpointError" and first["not JSON"][1].startswith("rank 2: TypeError: ")


def test_failures_without_fallback_take_precedence(agreed: list[dict[str, Any]]) -> None:
    order = ["ConfigError", "DataError", "CheckpointError", "StorageError", "DamagedError"]
    for number, (low, high) in enumerate(PAIRS):
        names = {met["pairs"][number][0] for met in agreed}
        assert names == {min(low.__name__, high.__name__, key=order.index)}
        from_rank = 0 if order.index(low.__name__) < order.index(high.__name__) else 2
        assert agreed[1]["pairs"][number][1] == f"rank {from_rank}: bad"


def test_a_single_process_reraises_without_a_process_group() -> None:
    assert run_on_all(SINGLE, lambda: 3) == 3
    assert gather_on_first(SINGLE, lambda: (1, 2)) == [[1, 2]]
    assert run_on_first(SINGLE, lambda: (1, None)) == [1, None]
    assert is_same_on_all(SINGLE, b"\x01")
    with pytest.raises(ValueError, match="^bad$"):
        run_on_all(SINGLE, raiser(ValueError("bad")))
    with pytest.raises(MegatronError, match="^bad$"):
        run_on_first(SINGLE, raiser(DataError("bad")))


def count(rank: int) -> dict[str, MessageSizes]:
    mesh = open_mesh(Layout())
    with count_messages() as on_all:
        run_on_all(mesh, lambda: "x" * 10_000)
    with count_messages() as on_first:
        run_on_first(mesh, lambda: "y" * 1000)
    with count_messages() as gathered:
        gather_on_first(mesh, lambda: "z" * (1000 + rank))
    return {"all": on_all, "first": on_first, "gather": gathered}


def test_bytes_of_a_rank_do_not_grow_with_the_world_except_on_the_first() -> None:
    two, four = run_ranks(count, 2), run_ranks(count, 4)
    for small in (two[0], two[1], four[3]):
        assert small["all"].total_bytes == 8
        assert small["first"].total_bytes == 8 + 1002
    assert two[1]["gather"].total_bytes == 8 + 1003  # agreement, the JSON text itself and nothing else
    assert four[3]["gather"].total_bytes == 8 + 1005
    assert two[0]["gather"].received_bytes < four[0]["gather"].received_bytes
