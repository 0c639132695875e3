"""Tokens reach their experts on other ranks, sorted by expert, and return to their own order."""

from __future__ import annotations

import pytest
import torch

from megatron.config import ParallelRequest
from megatron.parallel.expert.dispatch import Dispatch, Permutation
from megatron.parallel.expert.order import Slots
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.ranks import run_ranks

COUNT = 4
EXPERTS = (torch.tensor([[2, 0], [0, 1], [0, 2]]), torch.tensor([[1, 2], [2, 0]]))
WEIGHTS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
SLOTS = (Slots(torch.tensor([[0, 2], [0, 0], [1, 1]]), 2), Slots(torch.tensor([[0, 0], [1, 0]]), 2))


def dispatched(mesh: ParallelMesh, rank: int, limits: bool) -> tuple[list[list[float]], list[float]]:
    """The tokens at each of this rank's experts, and the sum of the weighted rows, times one more than the expert."""
    experts = EXPERTS[rank]
    dispatch = Dispatch.of(experts, COUNT, mesh.ep, SLOTS[rank] if limits else None)
    tokens = 10.0 * rank + torch.arange(len(experts), dtype=torch.float32).unsqueeze(1) + 1
    rows, ends = dispatch.arrived(dispatch.start(tokens))
    own = COUNT // mesh.ep.size
    parts = rows.chunk(own) if ends is None else rows.tensor_split(ends[:-1])
    first = mesh.ep.rank * own + 1
    result = torch.cat([part * (first + number) for number, part in enumerate(parts)])
    weights = dispatch.order.kept_weights(WEIGHTS[: len(experts)])
    return [part.flatten().tolist() for part in parts], dispatch.combined(result, weights).flatten().tolist()


def over_two_ranks(rank: int) -> list[tuple[list[list[float]], list[float]]]:
    mesh = open_mesh(ParallelRequest(expert_model_parallel_size=2))
    return [dispatched(mesh, rank, limits) for limits in (False, True)]


def test_every_expert_gets_the_tokens_that_chose_it() -> None:
    first, second = run_ranks(over_two_ranks, 2)
    assert (first[0][0], second[0][0]) == ([[1, 2, 3, 12], [2, 11]], [[1, 3, 11, 12], []])
    for rank, found in enumerate((first, second)):
        for limits in (False, True):
            alone = dispatched(ParallelMesh.single(), rank, limits)[1]
            assert found[limits][1] == alone and 0 not in alone
    assert [len(part) for part in (*first[1][0], *second[1][0])] == [2 * 2] * COUNT  # the rows of two ranks


@pytest.mark.parametrize("counts", [[[1, 2], [0, 1]], [[0, 0], [3, 0]]])
def test_a_permutation_sorts_by_expert_and_returns(counts: list[list[int]]) -> None:
    total = sum(map(sum, counts))
    order = Permutation.by_expert(torch.tensor(counts), total)
    rows = torch.arange(float(total)).unsqueeze(1).requires_grad_()
    experts = torch.tensor([expert for source in counts for expert, number in enumerate(source) for _ in range(number)])
    there = order.apply(rows)
    assert experts[order.sources].tolist() == sorted(experts.tolist())
    (order.inverse().apply(there) * rows.detach()).sum().backward()
    assert torch.equal(rows.grad, rows.detach())  # type: ignore[arg-type]
