"""Activation functions by the names of `--activation-function`, and their gated forms, of `x + bias`."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron.kernels.choice import Implementation

# The functions of `csrc/ops/activation`, by code.
FUNCTIONS = types.MappingProxyType({"gelu": 0, "gelu_tanh": 1, "relu": 2, "squared_relu": 3, "silu": 4, "linear": 5})

_QUICK_GELU = 1.702  # the slope at which a sigmoid is closest to GELU's

# Sources: Hendrycks and Gimpel, "Gaussian error linear units", 2016, section 2 (gelu, gelu_tanh, quick_gelu, silu); So
# et al., "Primer", 2021, section 3 (squared_relu); Clevert et al., "Fast and accurate deep network learning by
# exponential linear units", 2015, equation 1 (elu).
_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = types.MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(_QUICK_GELU * x),
        "relu": F.relu,
        "squared_relu": lambda x: F.relu(x).square(),
        "silu": F.silu,
        "elu": F.elu,
        "linear": lambda x: x,
    }
)


def activation(
    x: torch.Tensor,
    name: str,
    *,
    bias: torch.Tensor | None = None,
    implementation: Implementation = Implementation.TORCH,
) -> torch.Tensor:
    """The activation `name` of `x + bias`, elementwise.

    The compiled form rounds once, at the end, keeps only x for backward, and sums the gradient of the bias while it
    computes the gradient of x. It lacks `elu` and `quick_gelu`, which torch computes.

    Shapes: x `[..., f]`, bias `[f]`; result as x.
    """
    if implementation is Implementation.CSRC and name in FUNCTIONS and name != "linear":
        return torch.ops.megatron.activation(x, bias, FUNCTIONS[name], False)  # type: ignore[no-any-return]
    return _FUNCTIONS[name](x if bias is None else x + bias.to(x.dtype))


def gated(
    x: torch.Tensor,
    name: str,
    *,
    bias: torch.Tensor | None = None,
    limit: float | None = None,
    offset: float = 0.0,
    implementation: Implementation = Implementation.TORCH,
) -> torch.Tensor:
    """The gated unit `activation(gate) * (up + offset)` of `x + bias`; compiled like `activation`, unless with a limit
    or an offset.

    Shapes: x `[..., 2, f]` in the order gate, up; bias `[2 * f]`; result `[..., f]`.

    Args:
        limit: upper bound of the gate, and bound of the absolute value of up; None for none.

    Source: Shazeer, "GLU variants improve transformer", 2020, section 2; limit and offset: gpt-oss, as NVIDIA
    Megatron-LM's `activation_func_clamp_value` and `glu_linear_offset`.
    """
    is_plain = limit is None and offset == 0.0
    if implementation is Implementation.CSRC and name in FUNCTIONS and is_plain:
        return torch.ops.megatron.activation(x, bias, FUNCTIONS[name], True)  # type: ignore[no-any-return]
    if bias is not None:
        x = x + bias.to(x.dtype).view(2, -1)
    if not is_plain or name == "quick_gelu":
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _LimitedGated.apply(x, name, limit, offset)  # type: ignore[no-any-return]
        return _limited(x, name, limit, offset)
    if name in ("silu", "gelu", "gelu_tanh") and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Gated.apply(x, name)  # type: ignore[no-any-return]
    gate, up = x.unbind(-2)
    return _FUNCTIONS[name](gate) * up


def register() -> None:
    """Registers the result shapes of the compiled operation with torch; once, after the library is loaded."""
    torch.library.register_fake("megatron::activation", _shape)
    torch.library.register_fake("megatron::activation_backward", _shapes_of_gradients)


def _limited(x: torch.Tensor, name: str, limit: float | None, offset: float) -> torch.Tensor:
    """`gated` with a limit or an offset. Shapes: x `[..., 2, f]`; result `[..., f]`."""
    gate, up = x.unbind(-2)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return _FUNCTIONS[name](gate) * (up + offset)


class _LimitedGated(torch.autograd.Function):
    """Keeps only x for backward, which recomputes seven tensors of the size of the result."""

    @staticmethod
    def forward(ctx, x, name, limit, offset):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.arguments = name, limit, offset
        return _limited(x, name, limit, offset)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = _limited(x, *ctx.arguments)
        return *torch.autograd.grad(result, x, gradient), None, None, None


class _Gated(torch.autograd.Function):
    """Backward writes the gradients of gate and up into one tensor, without a copy to join them."""

    @staticmethod
    def forward(ctx, x, name):  # type: ignore[no-untyped-def]
        gate, up = x.unbind(-2)
        active = _FUNCTIONS[name](gate)
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


def _shape(x, bias, function, is_gated):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[:-2] + x.shape[-1:] if is_gated else x.shape)


def _shapes_of_gradients(gradient, x, bias, function, is_gated):  # type: ignore[no-untyped-def]
    of_bias = x.new_empty(0) if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
    return torch.empty_like(x, memory_format=torch.contiguous_format), of_bias
