"""Activations and gated units against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.config.architecture.feed_forward import ACTIVATIONS
from megatron.kernels.activations import activation, gated


def _formula(name: str, x: float) -> float:
    formulas = {
        "gelu": lambda: x * (1 + math.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
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
    pair = torch.stack((x, torch.arange(13.0, dtype=torch.float64) - 6)).requires_grad_()  # gate, up
    torch.testing.assert_close(gated(pair, name), expected * pair[1])
    if "relu" not in name:  # not differentiable at 0
        assert torch.autograd.gradcheck(lambda both: gated(both, name), pair)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_gradients_in_training_precision(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = []
    for precision in (torch.float64, dtype):
        pair = x.detach().to(precision).requires_grad_()
        y = gated(pair, name)
        assert y.dtype == precision and y.shape == (3, 5, 8)
        y.backward(torch.ones_like(y))
        gradients.append(pair.grad.double())
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(gradients[1], gradients[0], atol=tolerance, rtol=tolerance)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="'swish2'"):
        activation(torch.zeros(1), "swish2")
