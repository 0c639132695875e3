"""The collectives equal the dense operation, forward and backward."""

from __future__ import annotations

import pytest
import torch

from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor.collectives import (
    copy_to,
    gather_from,
    gather_sequence,
    reduce_from,
    scatter_sequence,
    scatter_to,
)
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks

EACH = (copy_to, reduce_from, gather_from, scatter_to, gather_sequence, scatter_sequence)


def _whole(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(24, dtype=dtype).view(2, 3, 4) / 8


def _every_one(rank: int, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    axis = open_mesh(Layout(2)).tp
    results = {}
    for name, apply in {
        "copy": lambda x: copy_to(x, axis) * (rank + 1),
        "reduce": lambda x: reduce_from(x * (rank + 1), axis),
        "gather": lambda x: gather_from(x[..., rank * 2 : rank * 2 + 2], axis),
        "gather dimension 0": lambda x: gather_from(x[rank : rank + 1], axis, dimension=0),
        "scatter": lambda x: scatter_to(x * 1, axis),
        "transposed": lambda x: reduce_from(x.mul(1).transpose(0, 2), axis),
    }.items():
        x = _whole(dtype).requires_grad_()
        y = apply(x)
        (y * torch.arange(y.numel(), dtype=dtype).view(y.shape)).sum().backward()
        results[name] = (y.detach().float(), x.grad.float())
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_on_two_ranks(dtype: torch.dtype) -> None:
    results = run_ranks(_every_one, 2, dtype)
    x = _whole(dtype).float()
    weights = torch.arange(24.0).view(2, 3, 4)
    for rank, result in enumerate(results):
        tolerance = {"rtol": 1e-6, "atol": 0} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 0.1}

        def same(name: str, forward: torch.Tensor, backward: torch.Tensor) -> None:
            torch.testing.assert_close(result[name][0], forward, **tolerance)  # noqa: B023
            torch.testing.assert_close(result[name][1], backward, **tolerance)  # noqa: B023

        same("copy", x * (rank + 1), weights * 3)
        same("reduce", x * 3, weights * (rank + 1))
        own = torch.zeros_like(x)
        own[..., rank * 2 : rank * 2 + 2] = weights[..., rank * 2 : rank * 2 + 2]
        same("gather", x, own)
        own = torch.zeros_like(x)
        own[rank] = weights[rank]
        same("gather dimension 0", x, own)
        half = torch.arange(12.0).view(2, 3, 2)  # each rank's weights, of its half
        same("scatter", x[..., rank * 2 : rank * 2 + 2], torch.cat([half, half], dim=-1))
        same("transposed", 2 * x.transpose(0, 2), torch.arange(24.0).view(4, 3, 2).transpose(0, 2))


def _sequences(rank: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    axis = open_mesh(Layout(2)).tp
    results = []
    for batch in (1, 3):
        whole = torch.arange(batch * 32, dtype=dtype).view(batch, 4, 8) / 8
        own = whole.chunk(2, dim=1)[rank].clone().requires_grad_()
        gathered = gather_sequence(own, axis)
        (gathered * whole * (rank + 1)).sum().backward()
        partial = (whole * (rank + 1)).requires_grad_()
        scattered = scatter_sequence(partial, axis)
        (scattered * whole.chunk(2, dim=1)[rank]).sum().backward()
        results.append((whole, gathered.detach(), own.grad, scattered.detach(), partial.grad))
    return results  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_are_gathered_and_summed_in_the_order_of_the_ranks(dtype: torch.dtype) -> None:
    for rank, results in enumerate(run_ranks(_sequences, 2, dtype)):
        for whole, gathered, of_own, scattered, of_partial in results:
            own = whole.chunk(2, dim=1)[rank]
            assert torch.equal(gathered, whole) and gathered.is_contiguous()
            torch.testing.assert_close(of_own, own * 3)
            torch.testing.assert_close(scattered, own * 3)
            assert torch.equal(of_partial, whole)


def test_on_an_axis_of_one_each_is_the_identity() -> None:
    axis, x = Axis.single("tp"), torch.ones(2)
    assert all(function(x, axis) is x for function in EACH)
