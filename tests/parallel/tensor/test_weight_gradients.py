"""Weight gradients computed later are those that the backward pass would have computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.config import PrecisionConfig
from megatron.config.sections.computation import HYBRID
from megatron.kernels.float8 import Float8
from megatron.parallel.mesh import Axis
from megatron.parallel.shard_spec import Dimension
from megatron.parallel.tensor import weight_gradients
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.weight_gradients import WeightGradientQueue, add_by_product

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


class Sums:
    """Takes products of matrices from the second of each parameter on."""

    def __init__(self) -> None:
        self.asked: list[nn.Parameter] = []
        self.by_parameter: dict[nn.Parameter, torch.Tensor] = {}

    def add_product(self, parameter: nn.Parameter, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Adds one."""
        self.asked.append(parameter)
        if self.asked.count(parameter) == 1:
            return False
        self.by_parameter[parameter] = self.by_parameter.get(parameter, torch.zeros(())) + a @ b
        return True


@pytest.mark.parametrize("is_later", [False, True])
def test_products_of_large_weights_are_added_to_their_sums(is_later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradients, "FEWEST_ADDED_CPU", 8 * 6)
    layers, alone, sums = network(torch.float32), network(torch.float32), Sums()
    queue = layers[0].queue = WeightGradientQueue() if is_later else None
    add_by_product(layers.modules(), sums.add_product)
    assert layers[1].queue is None and layers[0].queue is not None and queue in (None, layers[0].queue)
    for number in (1, 2, 3):
        x = torch.randn(2, 9, 6)
        alone(x).square().sum().backward()
        if queue is not None:
            queue.open()
        layers(x).square().sum().backward()
        for work in [] if queue is None else queue.close():
            assert len(sums.asked) == number - 1
            work()
    weight = layers[0].weight
    assert sums.asked == [weight] * 3 and list(sums.by_parameter) == [weight]
    weight.grad += sums.by_parameter[weight]
    for own, expected in zip(layers.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=2e-6, atol=1e-5)


def test_the_product_of_a_frozen_weight_keeps_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradients, "FEWEST_ADDED_CPU", 1)
    layers = network(torch.float32)
    layers[0].weight.requires_grad_(False)
    add_by_product(layers.modules(), Sums().add_product)
    assert layers[0].queue is None and layers[1].queue is not None
    layers[0].queue = WeightGradientQueue()  # of a pipeline's schedule
    x, kept = torch.randn(2, 9, 6, requires_grad=True), set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        inner = layers[0](x)
        layers[1](inner)
    assert x.data_ptr() not in kept and inner.data_ptr() in kept


def test_products_in_eight_bits_are_added_by_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradients, "FEWEST_ADDED_CPU", 1)
    layers, sums = network(torch.bfloat16), Sums()
    layers[0].float8 = Float8.of(PrecisionConfig(bf16=True, fp8_format=HYBRID, fp8_emulation=True))
    add_by_product(layers.modules(), sums.add_product)
    layers(torch.randn(2, 9, 6, dtype=torch.bfloat16)).sum().backward()
    assert sums.asked == [layers[1].weight]
