"""The collectives equal the dense operation, forward and backward."""

from __future__ import annotations

import pytest
import torch

from megatron.parallel.joining import open_mesh
from megatron.parallel.tensor.collectives import copy_to, gather_from, reduce_from, scatter_to
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks


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
