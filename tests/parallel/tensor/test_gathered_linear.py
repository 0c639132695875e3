"""A product with gathered tokens equals the plain one, keeps only the rank's own tokens, and sends what it must."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.parallel.joining import open_mesh
from megatron.parallel.tensor.gathered_linear import gathered_linear
from megatron.parallel.tensor.weight_gradients import WeightGradientQueue
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks

TOKENS, INPUTS, OUTPUTS = 6, 4, 5


def values(batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The tokens of all ranks, and weight, bias and the gradient of the output of each rank."""
    generator = torch.Generator().manual_seed(batch)
    shapes = ((batch, TOKENS, INPUTS), (2, OUTPUTS, INPUTS), (2, OUTPUTS), (2, batch, TOKENS, OUTPUTS))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


class KeptSizes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the values of each tensor that is kept for a backward pass."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        super().__init__(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sizes.append(tensor.numel())
        return tensor


def run_products(rank: int) -> list[dict[str, Any]]:
    axis = open_mesh(Layout(2)).tp
    found = []
    for batch, dtype, has_queue in ((1, torch.float64, False), (3, torch.float64, True), (3, torch.bfloat16, False)):
        x, weights, biases, gradients = values(batch, dtype)
        weight, bias = nn.Parameter(weights[rank]), nn.Parameter(biases[rank])
        own = x.chunk(2, dim=1)[rank].clone().requires_grad_()
        queue = WeightGradientQueue() if has_queue else None
        kept = KeptSizes()
        with kept:
            y = gathered_linear(own, weight, bias, axis, queue)
        if queue is not None:
            queue.open()
        y.backward(gradients[rank])
        late = weight.grad is None
        for work in [] if queue is None else queue.close():
            work()
        found.append(
            {"y": y.detach(), "x": own.grad, "weight": weight.grad, "bias": bias.grad, "kept": kept.sizes, "late": late}
        )
    return found


def test_gradients_equal_those_of_all_tokens_on_one_rank() -> None:
    ranks = run_ranks(run_products, 2)
    for case, (batch, dtype, has_queue) in enumerate(
        ((1, torch.float64, False), (3, torch.float64, True), (3, torch.bfloat16, False))
    ):
        x, weights, biases, gradients = values(batch, dtype)
        x = x.double().requires_grad_()
        joined = weights.double().flatten(0, 1).requires_grad_(), biases.double().flatten().requires_grad_()
        y = F.linear(x, *joined)
        y.backward(torch.cat(list(gradients.double()), dim=-1))
        for rank, cases in enumerate(ranks):
            found = cases[case]
            tolerance = {"rtol": 0.02, "atol": 0.1} if dtype is torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-12}
            for name, expected in {
                "y": y.chunk(2, dim=-1)[rank],
                "x": x.grad.chunk(2, dim=1)[rank],
                "weight": joined[0].grad.chunk(2)[rank],
                "bias": joined[1].grad.chunk(2)[rank],
            }.items():
                torch.testing.assert_close(found[name].double(), expected.detach(), **tolerance)
            assert max(found["kept"]) == max(batch * TOKENS // 2 * INPUTS, OUTPUTS * INPUTS)
            assert found["late"] is has_queue
