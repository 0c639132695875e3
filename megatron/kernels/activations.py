"""Activation functions by the names of `--activation-function`, and their gated forms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """The activation `name`, elementwise.

    Source: Hendrycks and Gimpel, "Gaussian error linear units", 2016, section 2 (gelu, gelu_tanh, silu); So et al.,
    "Primer", 2021, section 3 (squared_relu); Clevert et al., "Fast and accurate deep network learning by exponential
    linear units", 2015, equation 1 (elu).
    """
    match name:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "squared_relu":
            return F.relu(x).square()
        case "silu":
            return F.silu(x)
        case "elu":
            return F.elu(x)
        case "linear":
            return x
    raise ValueError(f"unknown activation {name!r}")


def gated(x: torch.Tensor, name: str) -> torch.Tensor:
    """The gated unit `activation(gate) * up`.

    Shapes: x `[..., 2, f]`, first the gate, then up; result `[..., f]`.

    Source: Shazeer, "GLU variants improve transformer", 2020, section 2.
    """
    if name in ("silu", "gelu", "gelu_tanh") and torch.is_grad_enabled():
        return _Gated.apply(x, name)  # type: ignore[no-any-return]
    gate, up = x.unbind(-2)
    return activation(gate, name) * up


class _Gated(torch.autograd.Function):
    """Backward writes the gradients of gate and up to their places, without a copy that joins them."""

    @staticmethod
    def forward(ctx, x, name):  # type: ignore[no-untyped-def]
        gate, up = x.unbind(-2)
        active = activation(gate, name)
        ctx.save_for_backward(x, active)
        ctx.name = name
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, active = ctx.saved_tensors
        gate, up = x.unbind(-2)
        result = torch.empty_like(x)
        of_gate, of_up = result.unbind(-2)
        torch.mul(active, gradient, out=of_up)
        if ctx.name == "silu":
            torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        else:
            form = "tanh" if ctx.name == "gelu_tanh" else "none"
            torch.ops.aten.gelu_backward.grad_input(gradient * up, gate, approximate=form, grad_input=of_gate)
        return result, None
