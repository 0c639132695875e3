"""A column-parallel product equals the plain one, keeps only what it needs, and overlaps its messages with products."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.kernels import products
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor import collectives, weight_gradients
from megatron.parallel.tensor.linear import column_linear
from megatron.parallel.tensor.weight_gradients import WeightGradientQueue
from tests.helpers.layouts import Layout
from tests.helpers.machines.launches import recorded
from tests.helpers.ranks import run_ranks

TOKENS, INPUTS, OUTPUTS = 6, 4, 5
INPUT_GRADIENT, WEIGHT_GRADIENT, SUM, WAIT = "input_gradient", "weight_gradient", "all_reduce", "wait_for"
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
LAUNCHES = (
    *((products, name) for name in (INPUT_GRADIENT, WEIGHT_GRADIENT)),
    *((dist, name) for name in (SUM, GATHER, SCATTER)),
    (collectives, WAIT),
)


class Case(NamedTuple):
    """One product, and what its backward pass launches in this order.

    Attributes:
        queue: its state during the backward pass, "adding" if it adds the weight gradient to a sum.
        frozen: the weight has no gradient.
    """

    launches: tuple[str, ...]
    batch: int = 3
    dtype: torch.dtype = torch.float64
    splits_sequence: bool = False
    queue: str | None = None
    overlaps: bool = True
    frozen: bool = False


HIDDEN = (INPUT_GRADIENT, SUM, WEIGHT_GRADIENT, WAIT)
SPLIT = (GATHER, INPUT_GRADIENT, WAIT, SCATTER, WEIGHT_GRADIENT, WAIT)
CASES = [
    Case(HIDDEN, batch=1),
    Case(HIDDEN, dtype=torch.bfloat16),
    Case(HIDDEN, queue="closed"),
    Case((INPUT_GRADIENT, SUM, "add_product", WAIT), queue="adding"),
    Case((INPUT_GRADIENT, SUM, WAIT, WEIGHT_GRADIENT), queue="open"),
    Case((INPUT_GRADIENT, SUM, WAIT), frozen=True),
    Case((INPUT_GRADIENT, WEIGHT_GRADIENT, SUM), queue="closed", overlaps=False),
    Case((SUM,), overlaps=False),  # the products are torch's
    Case(SPLIT, batch=1, splits_sequence=True),
    Case(SPLIT, dtype=torch.bfloat16, splits_sequence=True, overlaps=False),
    Case((INPUT_GRADIENT, SCATTER, WAIT, GATHER, WAIT, WEIGHT_GRADIENT), splits_sequence=True, queue="open"),
]


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


def run_product(case: Case, axis: Axis) -> dict[str, Any]:
    x, weights, biases, gradients = values(case.batch, case.dtype)
    weight, bias = nn.Parameter(weights[axis.rank], not case.frozen), nn.Parameter(biases[axis.rank])
    own = (x.chunk(2, dim=1)[axis.rank] if case.splits_sequence else x).clone().requires_grad_()
    queue, events = None if case.queue is None else WeightGradientQueue(), list[str]()
    if queue is not None and case.queue == "adding":

        def add_product(parameter: nn.Parameter, columns: torch.Tensor, rows: torch.Tensor) -> bool:
            events.append("add_product")
            parameter.grad = columns @ rows
            return True

        queue.add_product = add_product
    kept = KeptSizes()
    with kept:
        y = column_linear(own, weight, bias, axis, queue, splits_sequence=case.splits_sequence)
    if queue is not None and case.queue == "open":
        queue.open()
    with recorded(events, *LAUNCHES):
        y.backward(gradients[axis.rank])
        late = weight.grad is None
        for work in [] if queue is None else queue.close():
            work()
    found = {"y": y.detach(), "x": own.grad, "weight": weight.grad, "bias": bias.grad}
    return {**found, "kept": kept.sizes, "late": late, "launches": tuple(events)}


def run_products(rank: int) -> list[dict[str, Any]]:
    axis = open_mesh(Layout(2)).tp
    weight_gradients.FEWEST_ADDED_CPU = 1
    return [run_product(case, dataclasses.replace(axis, overlaps=case.overlaps)) for case in CASES]


def test_gradients_equal_those_on_one_rank_and_overlap_their_messages() -> None:
    ranks = run_ranks(run_products, 2)
    for index, case in enumerate(CASES):
        x, weights, biases, gradients = values(case.batch, case.dtype)
        x = x.double().requires_grad_()
        joined = weights.double().flatten(0, 1).requires_grad_(), biases.double().flatten().requires_grad_()
        y = F.linear(x, *joined)
        y.backward(torch.cat(list(gradients.double()), dim=-1))
        for rank, cases in enumerate(ranks):
            found = cases[index]
            tolerance = {"rtol": 0.02, "atol": 0.1} if case.dtype is torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-12}
            for name, expected in {
                "y": y.chunk(2, dim=-1)[rank],
                "x": x.grad.chunk(2, dim=1)[rank] if case.splits_sequence else x.grad,
                "weight": joined[0].grad.chunk(2)[rank],
                "bias": joined[1].grad.chunk(2)[rank],
            }.items():
                if name != "weight" or not case.frozen:
                    torch.testing.assert_close(found[name].double(), expected.detach(), **tolerance)
            tokens = 0 if case.frozen else case.batch * TOKENS * INPUTS // (2 if case.splits_sequence else 1)
            assert max(found["kept"]) == max(tokens, OUTPUTS * INPUTS)
            assert found["late"] is (case.queue == "open" or case.frozen)
            assert found["launches"] == case.launches, case
