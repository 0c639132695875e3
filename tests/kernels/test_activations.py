"""Activations and gated units against their formulas: the reference and the compiled operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from megatron.config.architecture.feed_forward import ACTIVATIONS
from megatron.kernels.activations import FUNCTIONS, activation, gated
from megatron.kernels.choice import Implementation
from megatron.kernels.native.library import Library

CSRC, TORCH = Implementation.CSRC, Implementation.TORCH


def _formula(name: str, x: float) -> float:
    formulas = {
        "gelu": lambda: x * (1 + math.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        "quick_gelu": lambda: x / (1 + math.exp(-1.702 * x)),
        "relu": lambda: max(x, 0.0),
        "squared_relu": lambda: max(x, 0.0) ** 2,
        "silu": lambda: x / (1 + math.exp(-x)),
        "elu": lambda: x if x > 0 else math.expm1(x),
        "linear": lambda: x,
    }
    return formulas[name]()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_and_its_gated_form(name: str) -> None:
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    expected = torch.tensor([_formula(name, float(entry)) for entry in x], dtype=torch.float64)
    torch.testing.assert_close(activation(x, name), expected)
    torch.testing.assert_close(activation(x - 1, name, bias=torch.ones(13)), expected)
    pair = torch.stack((x, torch.arange(13.0, dtype=torch.float64) - 6)).requires_grad_()  # gate, up
    torch.testing.assert_close(gated(pair, name), expected * pair[1])
    torch.testing.assert_close(gated(pair - 1, name, bias=torch.ones(26)), expected * pair[1])
    if "relu" not in name:  # not differentiable at 0
        assert torch.autograd.gradcheck(lambda both: gated(both, name), pair)


@pytest.mark.parametrize("implementation", Implementation)
@pytest.mark.parametrize("name", ["quick_gelu", "silu"])
def test_a_limit_and_an_offset_are_those_of_gpt_oss(name: str, implementation: Implementation) -> None:
    config = GptOssConfig(swiglu_alpha=1.702 if name == "quick_gelu" else 1.0, swiglu_limit=1.5)
    pairs = [
        (3 * torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1))).double().requires_grad_()
        for _ in range(2)
    ]
    theirs = SimpleNamespace(alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    expected = GptOssExperts._apply_gate(theirs, pairs[0].transpose(-1, -2).flatten(-2))
    found = gated(pairs[1], name, limit=1.5, offset=1.0, implementation=implementation)
    for each in (expected, found):
        each.square().sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(pairs[1].grad, pairs[0].grad)
    assert (pairs[0].grad[:, 0] == 0).any() and (pairs[0].grad[:, 1] == 0).any()  # some were limited
    with torch.no_grad():
        assert torch.equal(gated(pairs[1], name, limit=1.5, offset=1.0), found)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(KeyError, match="'swish2'"):
        activation(torch.zeros(1), "swish2")


def _case(dtype: torch.dtype, is_gated: bool, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """x, bias, and the gradient of the result."""
    generator = torch.Generator().manual_seed(rows + columns)
    width = 2 * columns if is_gated else columns
    shape = (rows, 2, columns) if is_gated else (rows, columns)
    x, bias, gradient = (torch.randn(*size, generator=generator) for size in (shape, (width,), (rows, columns)))
    return (3 * x).to(dtype), bias.to(dtype), gradient.to(dtype)


def _run(
    function: Callable[..., torch.Tensor],
    name: str,
    implementation: Implementation,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    gradient: torch.Tensor,
) -> list[torch.Tensor]:
    """The result and the gradients of x and, if given, of the bias."""
    inputs = [part.detach().requires_grad_() for part in (x, bias) if part is not None]
    y = function(inputs[0], name, bias=inputs[1] if bias is not None else None, implementation=implementation)
    return [y.detach(), *torch.autograd.grad(y, inputs, gradient)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_far_from_zero_and_gradients_of_float64(compiled: Library, name: str) -> None:
    far = torch.tensor([1e4, 1e30, 300.0, 40.0, 0.0, -5.0, -12.0, -40.0, -300.0, -1e4, -1e30, math.nan, math.inf])
    pair = torch.stack((far, torch.ones_like(far)))
    y, gradient = _run(gated, name, CSRC, pair, None, torch.ones_like(far))
    exact = _run(gated, name, TORCH, pair.double(), None, torch.ones_like(far, dtype=torch.float64))
    torch.testing.assert_close(y, exact[0].float(), atol=1e-30, rtol=3e-6, equal_nan=True)
    finite = far.abs() < 1e5  # the reference overflows beyond
    assert gradient[:, far.abs() < 1e31].isfinite().all() or name == "squared_relu"
    assert gradient[:, far.isnan()].isnan().any()
    torch.testing.assert_close(gradient[:, finite], exact[1][:, finite].float(), atol=2e-7, rtol=3e-6)
    x, bias, _ = _case(torch.float64, True, 3, 5)
    wide = [part.requires_grad_() for part in (x, bias)]
    assert torch.autograd.gradcheck(lambda one, other: gated(one, name, bias=other, implementation=CSRC), wide)
    flat = [x[:, 0].detach().requires_grad_(), bias[:5].detach().requires_grad_()]
    assert torch.autograd.gradcheck(lambda one, other: activation(one, name, bias=other, implementation=CSRC), flat)


def test_mixed_dtypes_and_empty_tensors(compiled: Library) -> None:
    large, bias, gradient = _case(torch.float32, True, 300, 130)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = _run(activation, "gelu", CSRC, large[:, 0].bfloat16(), bias[:130], gradient.bfloat16())
    assert [part.dtype for part in mixed] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert gated(torch.zeros(0, 2, 4), "gelu", implementation=CSRC).shape == (0, 4)
    empty = _run(activation, "gelu", CSRC, torch.zeros(0, 4), torch.zeros(4), torch.zeros(0, 4))
    assert torch.equal(empty[2], torch.zeros(4))
    assert torch.equal(activation(-large, "elu", implementation=CSRC), activation(-large, "elu"))


def test_torch_knows_the_operation(compiled: Library) -> None:
    for is_gated in (False, True):
        x, bias, gradient = _case(torch.float64, is_gated, 3, 5)
        inputs = (x.requires_grad_(), bias.requires_grad_() if is_gated else None, FUNCTIONS["gelu"], is_gated)
        torch.library.opcheck(torch.ops.megatron.activation.default, inputs)
        plain = (part.detach() if isinstance(part, torch.Tensor) else part for part in inputs)
        torch.library.opcheck(torch.ops.megatron.activation_backward.default, (gradient, *plain))
