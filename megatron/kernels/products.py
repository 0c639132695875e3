"""Matrix products of layers, in float32 where a CPU has no instructions for bfloat16."""

from __future__ import annotations

import platform
from functools import cache

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

FEWEST_WIDE_ROWS = 16  # with fewer, converting the matrix takes longer than multiplying by it


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b`.

    On x86 CPUs without instructions for bfloat16 torch's product takes three to four times as long as converting the
    operands to float32 and the result back, which is as exact: sums are float32 either way, and rounded once. The few
    rows of text generation are multiplied as they are.

    Shapes: x `[..., i]`, weight `[o, i]`, bias `[o]`; result `[..., o]`.
    """
    if not needs_widening(x, x.numel() // max(1, x.shape[-1])):
        return F.linear(x, weight, bias)
    return _WideLinear.apply(x, weight, bias)  # type: ignore[no-any-return]


def batched_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of each pair of matrices, in float32 where that is faster, as in `linear`.

    Shapes: `[n, i, j]` and `[n, j, k]` to `[n, i, k]`.
    """
    if not needs_widening(a, a.shape[1]):
        return torch.bmm(a, b)
    return _WideProduct.apply(a, b)  # type: ignore[no-any-return]


def needs_widening(x: torch.Tensor, rows: int = FEWEST_WIDE_ROWS) -> bool:
    """Whether products of a tensor are faster in float32 although it is kept in bfloat16.

    Args:
        rows: how many rows are multiplied by each matrix.
    """
    is_half_on_cpu = x.dtype is torch.bfloat16 and x.device.type == "cpu"
    return is_half_on_cpu and rows >= FEWEST_WIDE_ROWS and not has_bfloat16_products()


@cache
def has_bfloat16_products() -> bool:
    """Whether this machine's CPU multiplies bfloat16 matrices by instructions of its own."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True  # not measured elsewhere
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is None or check() for check in checks)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        result = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return result.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        wide = gradient.float()
        rows = wide.reshape(-1, wide.shape[-1])  # [n, o]
        of_x = (wide @ weight.float()).to(x.dtype) if needs_x else None
        of_weight = (rows.t() @ x.reshape(-1, x.shape[-1]).float()).to(weight.dtype) if needs_weight else None
        of_bias = rows.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return of_x, of_weight, of_bias


class _WideProduct(torch.autograd.Function):
    """Keeps its factors in bfloat16."""

    @staticmethod
    def forward(ctx, a, b):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(a, b)
        return torch.bmm(a.float(), b.float()).to(a.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        a, b = ctx.saved_tensors
        wide = gradient.float()
        of_a = torch.bmm(wide, b.float().transpose(1, 2)).to(a.dtype) if ctx.needs_input_grad[0] else None
        of_b = torch.bmm(a.float().transpose(1, 2), wide).to(b.dtype) if ctx.needs_input_grad[1] else None
        return of_a, of_b
