"""Weight gradients computed later are those that the backward pass would have computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.parallel.mesh import Axis
from megatron.parallel.shard_spec import Dimension
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.weight_gradients import WeightGradientQueue

SINGLE = Axis.single("tp")


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Sequential(
        ColumnParallelLinear(6, [Dimension("outputs", 8)], SINGLE), RowParallelLinear(8, 5, SINGLE, bias=False)
    )
    for parameter in layers.parameters():
        nn.init.normal_(parameter)
    return layers.to(dtype)


def plain(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layers(x)


def recomputed(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layers, x, use_reentrant=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [plain, recomputed])
def test_later_is_as_at_once(run: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x = torch.randn(2, 9, 6, dtype=dtype)
    gradients: dict[str, list[torch.Tensor | None]] = {}
    for name in ("without a queue", "closed", "open"):
        layers, given = network(dtype), x.clone().requires_grad_()
        queue = WeightGradientQueue()
        layers[0].weight.grad = torch.ones_like(layers[0].weight)  # what was there is kept
        if name != "without a queue":
            layers[0].queue = layers[1].queue = queue
        result = run(layers, given)
        if name == "open":
            queue.open()
        result.float().square().sum().backward()
        if name == "open":
            assert torch.equal(layers[0].weight.grad, torch.ones_like(layers[0].weight)), "computed at once after all"
            assert layers[0].bias.grad is None and layers[1].weight.grad is None
            work = queue.close()
            assert len(work) == 2 and not queue.is_open
            for each in work:
                each()
        gradients[name] = [given.grad, *(parameter.grad for parameter in layers.parameters())]
    for name in ("closed", "open"):
        for got, expected in zip(gradients[name], gradients["without a queue"], strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-6 if dtype is torch.float32 else 1e-2, atol=1e-5)


def test_frozen_parameters_leave_nothing_for_later() -> None:
    layers, queue = network(torch.float32), WeightGradientQueue()
    layers[0].queue = layers[1].queue = queue
    layers.requires_grad_(False)
    layers[0].bias.requires_grad_()
    queue.open()
    layers(torch.randn(3, 6)).sum().backward()
    for work in queue.close():
        work()
    assert layers[0].bias.grad is not None
    assert layers[0].weight.grad is layers[1].weight.grad is None


def test_a_closed_queue_takes_nothing() -> None:
    with pytest.raises(RuntimeError, match="the queue of weight gradients is closed"):
        WeightGradientQueue().add(lambda: None)
