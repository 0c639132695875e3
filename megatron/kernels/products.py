"""Matrix products of layers, in float32 on CPUs without instructions for bfloat16."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron.processor import cpu_vendor

FEWEST_WIDE_ROWS = 16  # with fewer, converting the matrix takes longer than multiplying by it
SMALLEST_PACKED = 1 << 17  # values of a matrix; smaller ones stay in a core's cache
# The layout of oneDNN that is fast from 2 to 512 rows. With 1 row the layers of GPT-2 take a tenth longer than torch's
# product, and the head a quarter less.
_PACKED_ROWS = 32

# Fewest multiplications of a product for which oneDNN is faster than torch's BLAS library, if that does not use all
# instructions of the CPU; and the size of the parts in which such a product is added to a sum.
SMALLEST_ONEDNN = 1 << 21
PART_VALUES, FEWEST_PART_ROWS = 1 << 19, 64

_ADDING_DEVICES = ("cuda",)  # on which torch may support products that add to a sum of another dtype

# The signatures of the private operations; one that has changed is not used.
_PRODUCT = "(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm) -> Tensor Y"
_PACKING = "(Tensor self, int? batch_size=None) -> Tensor Y"


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b`.

    On x86 CPUs without instructions for bfloat16 torch's product takes three to four times as long as converting the
    operands to float32 and the result back, which is as exact: sums are float32 either way, and rounded once. The few
    rows of text generation are not converted; in float32 oneDNN multiplies them, which takes 0.5 to 0.9 times as long
    as torch's BLAS library. Training in float32 uses `matrix_product`. A weight may be `packed`.

    Shapes: x `[..., i]`, weight `[o, i]`, bias `[o]`; result `[..., o]`.
    """
    if x.dtype is torch.bfloat16 and needs_widening(x) and _rows(x) >= FEWEST_WIDE_ROWS:
        return _WideLinear.apply(x, weight, bias)  # type: ignore[no-any-return]
    if weight.is_mkldnn or (not torch.is_grad_enabled() and _is_for_onednn(x, weight)):
        return _onednn_product(x, weight, bias)
    if x.numel() * weight.shape[0] >= SMALLEST_ONEDNN and _is_faster_with_onednn(x):
        if torch.is_grad_enabled():
            return _OneDnnLinear.apply(x, weight, bias)  # type: ignore[no-any-return]
        return _onednn_product(x, weight, bias)
    return F.linear(x, weight, bias)


def input_gradient(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of `linear`'s input. Shapes: gradient `[..., o]`, weight `[o, i]`; result `[..., i]`."""
    if gradient.dtype is torch.bfloat16 and needs_widening(gradient, _rows(gradient)):
        return (gradient.float() @ weight.float()).to(gradient.dtype)
    return matrix_product(gradient, weight)


def weight_gradient(x: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of `linear`'s weight. Shapes: x `[..., i]`, gradient `[..., o]`; result `[o, i]`."""
    if x.dtype is torch.bfloat16 and needs_widening(x, _rows(x)):
        x, gradient = x.float(), gradient.float()
    return matrix_product(gradient.reshape(-1, gradient.shape[-1]).t(), x.reshape(-1, x.shape[-1])).to(dtype)


def matrix_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a b`, without a gradient.

    In float32 on x86 CPUs that are not Intel's, oneDNN computes all but small products, in half the time: MKL, torch's
    BLAS library, does not use their AVX-512 instructions.

    Shapes: `[..., j]` and `[j, k]` to `[..., k]`.
    """
    if a.numel() * b.shape[1] >= SMALLEST_ONEDNN and _is_faster_with_onednn(a):
        return _onednn_product(a, b.t())
    return a @ b


def add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, replaces: bool = False) -> None:
    """`total += a b`, where the sum may be in float32 and the matrices in half precision.

    If torch supports it, the product itself adds to the sum, without rounding to half precision and without another
    pass over the sum. oneDNN's products are added in parts that stay in cache.

    Shapes: total `[i, k]`, a `[i, j]`, b `[j, k]`.

    Args:
        replaces: compute `total = a b` instead, without reading `total`.
    """
    beta = 0 if replaces else 1
    if a.numel() * b.shape[1] >= SMALLEST_ONEDNN and _is_faster_with_onednn(a):
        for part, rows, columns in _parts(total, a, b):
            product = _onednn_product(rows, columns.t())
            _ = part.copy_(product) if replaces else part.add_(product)
    elif total.dtype is a.dtype:
        total.addmm_(a, b, beta=beta)
    elif _adds_to_float32(a.device, a.dtype):
        torch.addmm(total, a, b, beta=beta, out_dtype=torch.float32, out=total)
    elif replaces:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


def _parts(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Splits a sum along its longer dimension, with the factors of each part."""
    rows, columns = total.shape
    dim, other = (0, columns) if rows >= columns else (1, rows)
    size = max(FEWEST_PART_ROWS, PART_VALUES // max(1, other))
    for first in range(0, total.shape[dim], size):
        count = min(size, total.shape[dim] - first)
        part = total.narrow(dim, first, count)
        yield (part, a.narrow(0, first, count), b) if dim == 0 else (part, a, b.narrow(1, first, count))


def can_add_product(total: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if a product of matrices of a dtype can add to a float32 sum without another pass."""
    if total.dtype is not torch.float32:
        return False
    return dtype is torch.float32 or _adds_to_float32(total.device, dtype)


def product_in_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a b` in float32, rounded to half precision in between only if torch has no other product.

    Shapes: `[i, j]` and `[j, k]` to `[i, k]`.
    """
    if a.dtype is not torch.float32 and _adds_to_float32(a.device, a.dtype):
        return torch.mm(a, b, out_dtype=torch.float32)
    return matrix_product(a, b).to(torch.promote_types(a.dtype, torch.float32))


@cache
def _adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """True if half-precision products can add to a float32 sum on a device, which is tried once.

    torch has these arguments for CUDA since 2.8, and at first rejected a sum of another dtype than the matrices.
    """
    if device.type not in _ADDING_DEVICES:
        return False
    total, ones = torch.ones(8, 8, device=device), torch.ones(8, 8, device=device, dtype=dtype)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
        replaced = torch.full_like(total, torch.nan)
        torch.addmm(replaced, ones, ones, beta=0, out_dtype=torch.float32, out=replaced)
        product = torch.mm(ones, ones, out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return False
    return bool((total == 9).all() & (replaced == 8).all() & (product == 8).all())


def batched_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of each pair of matrices, in float32 where that is faster, as in `linear`.

    Shapes: `[n, i, j]` and `[n, j, k]` to `[n, i, k]`.
    """
    if not needs_widening(a, a.shape[1]):
        return torch.bmm(a, b)
    return _WideProduct.apply(a, b)  # type: ignore[no-any-return]


def _rows(x: torch.Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def needs_widening(x: torch.Tensor, rows: int = FEWEST_WIDE_ROWS) -> bool:
    """True if products of a bfloat16 tensor are faster in float32.

    Args:
        rows: number of rows that each matrix multiplies.
    """
    is_half_on_cpu = x.dtype is torch.bfloat16 and x.device.type == "cpu"
    return is_half_on_cpu and rows >= FEWEST_WIDE_ROWS and not has_bfloat16_products()


def _is_for_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if a product belongs to text generation and is faster with oneDNN."""
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch.is_inference_mode_enabled()
        and x.dtype is weight.dtype is torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and weight.is_contiguous()
        and has_onednn_product()
    )


def _is_faster_with_onednn(x: torch.Tensor) -> bool:
    """True if oneDNN computes large products of training faster than torch."""
    return x.dtype is torch.float32 and x.is_cpu and not torch.compiler.is_compiling() and has_slow_blas()


def _onednn_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b`; not a view, like torch's product, since autograd rejects an in-place sum over ranks of a view.

    A transposed part of a larger matrix is copied: for such a weight oneDNN has only a reference implementation, which
    takes a thousand times as long.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if not (weight.is_mkldnn or weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    if x.dim() == 2:
        return product
    return torch.ops.aten._unsafe_view(product, [*x.shape[:-1], product.shape[1]])  # type: ignore[no-any-return]


@cache
def has_slow_blas() -> bool:
    """True if torch's BLAS library does not use all instructions of this machine's CPU."""
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return (
        is_wide
        and cpu_vendor() not in ("", "GenuineIntel")
        and torch.backends.mkl.is_available()
        and has_onednn_product()
    )


@cache
def has_onednn_product() -> bool:
    """True if this torch has oneDNN's product, a private operation of its compiler that may disappear."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")  # not measured elsewhere
    return is_x86 and torch.backends.mkldnn.is_available() and has_signature("_linear_pointwise", _PRODUCT)


def has_signature(name: str, expected: str) -> bool:
    """True if torch has a private operation of oneDNN with this signature."""
    operation = getattr(torch.ops.mkldnn, name, None)
    schema = getattr(getattr(operation, "default", None), "_schema", None)
    return str(schema).replace("SymInt", "int") == f"mkldnn::{name}{expected}"


def packed(weight: torch.Tensor) -> torch.Tensor | None:
    """The matrix in oneDNN's packed layout, for `linear` only; None if that gains nothing.

    It takes as much memory as the plain one and 0.5 to 0.9 times the time. A trial product is compared with torch's,
    and a matrix whose products differ by more than rounding is not packed.

    Shapes: weight `[o, i]`.
    """
    is_plain = weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
    if not is_plain or weight.numel() < SMALLEST_PACKED or not _has_packing():
        return None
    with torch.no_grad():
        plain = weight.detach()
        reordered: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(plain, _PACKED_ROWS)
        x = torch.randn(8, plain.shape[1], generator=torch.Generator().manual_seed(1))
        expected = F.linear(x, plain)
        difference = (linear(x, reordered) - expected).abs().max()
        return reordered if bool(difference <= 1e-5 * expected.abs().max()) else None


@cache
def _has_packing() -> bool:
    return has_onednn_product() and has_signature("_reorder_linear_weight", _PACKING)


def has_bfloat16_products() -> bool:
    """True if this machine's CPU has instructions for products of bfloat16 matrices."""
    return _queried_bfloat16_products()


def prepare_for_compiler() -> None:
    """Marks a property of this machine as a constant for torch.compile; a decorator would load the compiler."""
    torch.compiler.assume_constant_result(has_bfloat16_products)  # type: ignore[no-untyped-call]


@cache
def _queried_bfloat16_products() -> bool:
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


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        of_x = None if weight is None else input_gradient(gradient, weight)
        of_weight = None if x is None else weight_gradient(x, gradient, x.dtype)
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
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
