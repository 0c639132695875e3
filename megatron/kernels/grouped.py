"""Products of consecutive groups of rows with one matrix per group."""

from __future__ import annotations

import itertools

import torch
from torch.autograd.function import once_differentiable
from torch.torch_version import TorchVersion

from megatron.kernels.products import add_product_

_HOPPER, _DATA_CENTER_BLACKWELL = 9, 10  # major numbers of compute capabilities
_ALIGNED_BYTES = 16


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiplies every row by the transposed matrix of its group, and adds the group's bias; the gradients of an empty
    group's matrix and bias are zero.

    On Hopper and data center Blackwell GPUs one kernel computes all groups in bfloat16. Otherwise there is one product
    per group, and the host synchronizes to read `ends`; likewise without rows, which the kernel does not support.

    Shapes: x `[m, i]`, weight `[g, o, i]`, bias `[g, o]`, ends `[g]` int64, one past the last row of each group, the
        last being m; result `[m, o]`.
    """
    generation = _generation(x)
    if len(x) == 0 or not _has_grouped_kernel(x, weight, generation):
        if ends.is_meta:  # without values: an even load
            return equal_groups_linear(x, weight, bias)
        return _GroupedLinear.apply(x, weight, bias, ends.tolist())  # type: ignore[no-any-return]
    if generation > _HOPPER:
        weight = _ZeroGradientIfEmpty.apply(weight, ends)
    product = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
    return product if bias is None else _GroupedBias.apply(product, bias, ends)


def equal_groups_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`grouped_linear` for groups of equal size, as one batched product.

    Shapes: x `[g * m, i]`, weight `[g, o, i]`, bias `[g, o]`; result `[g * m, o]`.
    """
    rows, matrices = x.view(weight.shape[0], -1, x.shape[1]), weight.transpose(1, 2)
    products = torch.bmm(rows, matrices) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, matrices)
    return products.flatten(0, 1)


def _has_grouped_kernel(x: torch.Tensor, weight: torch.Tensor, generation: int) -> bool:
    """True if torch's kernel supports these operands; it requires rows of a multiple of 16 bytes.

    Until torch 2.9, which added data center Blackwell, it supports Hopper only.
    """
    if x.dtype is not torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    if generation == _DATA_CENTER_BLACKWELL:
        is_known = TorchVersion(torch.__version__) >= "2.9"
    else:
        is_known = generation == _HOPPER
    values = _ALIGNED_BYTES // x.element_size()
    return is_known and weight.shape[1] % values == 0 and weight.shape[2] % values == 0


def _generation(x: torch.Tensor) -> int:
    """The major number of the compute capability of a tensor's GPU; 0 for tensors elsewhere."""
    return torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0


class _ZeroGradientIfEmpty(torch.autograd.Function):
    """The identity, whose backward zeroes the gradients of groups without rows.

    On Blackwell torch's kernel leaves those uninitialized.

    Source: https://github.com/pytorch/pytorch/issues/172439.
    """

    @staticmethod
    def forward(ctx, weight, ends):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ends)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (ends,) = ctx.saved_tensors
        is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0  # [g]
        return gradient.masked_fill(is_empty.view(-1, 1, 1), 0), None


class _GroupedBias(torch.autograd.Function):
    """Adds the bias of its group to every row, without reading the groups' sizes on the host.

    The gradient of a bias is a product with ones, which torch's kernel sums in float32 and in a fixed order. It is
    computed eight times, since the kernel requires rows of 16 bytes, and kept once.
    """

    @staticmethod
    def forward(ctx, rows, bias, ends):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ends)
        groups = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
        return rows + bias.index_select(0, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (ends,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        ones = gradient.new_ones(len(gradient), _ALIGNED_BYTES // gradient.element_size())
        sums = torch._grouped_mm(ones.t(), gradient, offs=ends.to(torch.int32))[:, 0]
        is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0  # [g]
        return gradient, sums.masked_fill(is_empty.unsqueeze(1), 0), None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, ends):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.ends = ends
        result = x.new_empty(x.shape[0], weight.shape[1])
        for group, (first, last) in enumerate(itertools.pairwise((0, *ends))):
            if last > first:
                target = result[first:last]
                if bias is not None:
                    target.copy_(bias[group])
                add_product_(target, x[first:last], weight[group].t(), replaces=bias is None)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        of_x = torch.empty_like(x) if needs_x else None
        weight_gradient = torch.empty_like(weight) if needs_weight else None
        of_bias = weight.new_empty(weight.shape[:2]) if needs_bias else None
        for group, (first, last) in enumerate(itertools.pairwise((0, *ctx.ends))):
            rows = gradient[first:last]
            if of_x is not None and last > first:
                add_product_(of_x[first:last], rows, weight[group], replaces=True)
            if weight_gradient is not None:
                add_product_(weight_gradient[group], rows.t(), x[first:last], replaces=True)  # zeros for an empty group
            if of_bias is not None:
                torch.sum(rows, dim=0, out=of_bias[group])
        return of_x, weight_gradient, of_bias, None
