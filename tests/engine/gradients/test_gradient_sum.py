"""Groups of parameters in flat tensors, and gradients that stay where autograd adds them up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.engine.buckets.averaging import Averaging
from megatron.engine.buckets.flat_bucket import FlatGroup
from megatron.engine.gradients import gradient_sum
from megatron.engine.gradients.direct_gradients import DirectGradients
from megatron.engine.gradients.main_gradients import MainGradients
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import PendingMessage
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks


def test_a_group_is_in_the_order_of_the_flat_tensor() -> None:
    flat = torch.zeros(12, dtype=torch.bfloat16)
    last, first = nn.Parameter(flat[6:11]), nn.Parameter(flat[:4].view(2, 2))
    group = FlatGroup.of([last, first], flat)
    assert group.parameters == (first, last) and group.starts == (0, 6) and group.length == 12
    assert list(group.counted(lambda _: True, 0, 12)) == [(0, 4), (6, 11)]
    assert list(group.counted(lambda _: True, 3, 8)) == [(3, 4), (6, 8)]
    assert list(group.counted(lambda each: each is last, 4, 6)) == []
    assert list(group.counted(lambda each: each is last, 0, 12)) == [(6, 11)]


def in_place(rank: int) -> list[list[float]]:
    """The averages of three parameters, one of which has no gradient, in buckets of at most five elements."""
    axis = open_mesh(Layout()).gradient
    parameters = [nn.Parameter(torch.zeros(size)) for size in (4, 3, 2)]
    held = DirectGradients(parameters, lambda each: each is not parameters[0], Averaging(axis, torch.float32), 5)
    for step in range(2):
        for number, parameter in enumerate(parameters[:2]):
            (parameter * (number + 1.0 + rank)).sum().backward()
        held.add(parameters)
        if step == 0:
            parameters[0].grad = None
    assert held.of(parameters[1]) is parameters[1].grad and held.parts == ()
    held.reduce()
    found = [parameter.grad.tolist() for parameter in parameters]
    assert [each.tolist() for each in held.counted] == found[1:] and len(held.buffers) == 3
    held.clear()
    assert held.buffers == []
    return found


def test_ranks_average_what_autograd_has_added_up() -> None:
    assert run_ranks(in_place, 2) == [[[1.5] * 4, [5.0] * 3, [0.0] * 2]] * 2


@pytest.mark.parametrize("network_on", ["cpu", "meta"])
def test_a_tied_weight_is_summed_after_the_average_where_the_network_is(
    network_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part is in the memory of the host if the optimizer is offloaded."""
    sent: list[tuple[str, str, int]] = []

    def scattered(values: torch.Tensor, axis: Axis) -> PendingMessage:
        sent.append((axis.name, values.device.type, len(values)))
        return PendingMessage(values[axis.rank * len(values) // axis.size :][: len(values) // axis.size], None, axis)

    def summed(values: torch.Tensor, axis: Axis) -> torch.Tensor:
        sent.append((axis.name, values.device.type, len(values)))
        return torch.full((len(values),), 3.0)

    monkeypatch.setattr("megatron.engine.buckets.averaging.start_reduce_scatter_sum", scattered)
    monkeypatch.setattr(gradient_sum, "all_reduce_sum", summed)
    weights, ends = nn.Parameter(torch.zeros(4, device=network_on)), Axis("embedding", 0, 2, (0, 3))
    groups = [FlatGroup((weights,), (0,), 4)]
    averaging = Averaging(Axis("gradient", 1, 2, (0, 1)), torch.float32)
    held = MainGradients([torch.ones(4)], groups, lambda _: True, averaging)
    held.reduce([(weights, ends)])
    assert sent == [("gradient", "cpu", 4), ("embedding", network_on, 2)]
    assert held.parts[0].tolist() == [3.0, 3.0]
