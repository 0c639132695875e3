"""Products of consecutive groups of rows with one matrix per group."""

from __future__ import annotations

import itertools

import torch
from torch.autograd.function import once_differentiable

_HOPPER = (9, 0)
_ALIGNED_BYTES = 16


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies every row by the transposed matrix of its group; the gradient of an empty group's matrix is zero.

    On Hopper GPUs in bfloat16 one kernel computes all groups. Elsewhere it is a product per group, for which the host
    reads `ends`, so a GPU is waited for.

    Shapes: x `[m, i]`, weight `[g, o, i]`, ends `[g]` int64, one past the last row of each group, the last being m;
        result `[m, o]`.
    """
    if _has_grouped_kernel(x, weight):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
    return _GroupedLinear.apply(x, weight, ends.tolist())  # type: ignore[no-any-return]


def _has_grouped_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch's kernel takes these operands; it needs rows of a multiple of 16 bytes."""
    if not x.is_cuda or x.dtype is not torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    values = _ALIGNED_BYTES // x.element_size()
    is_aligned = weight.shape[1] % values == 0 and weight.shape[2] % values == 0
    return is_aligned and torch.cuda.get_device_capability(x.device) >= _HOPPER


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, ends):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.ends = ends
        result = x.new_empty(x.shape[0], weight.shape[1])
        for group, (first, last) in enumerate(itertools.pairwise((0, *ends))):
            if last > first:
                torch.mm(x[first:last], weight[group].t(), out=result[first:last])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        of_x = torch.empty_like(x) if needs_x else None
        of_weight = torch.empty_like(weight) if needs_weight else None
        for group, (first, last) in enumerate(itertools.pairwise((0, *ctx.ends))):
            rows = gradient[first:last]
            if of_x is not None and last > first:
                torch.mm(rows, weight[group], out=of_x[first:last])
            if of_weight is not None:
                torch.mm(rows.t(), x[first:last], out=of_weight[group])  # zeros for an empty group
        return of_x, of_weight, None
