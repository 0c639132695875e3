"""Rotation against a product of complex numbers, in both conventions and partial widths."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels.native.library import Library
from megatron.kernels.rotary import doubled, rotate, rotate_few


def _case(width: int, batch: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 5, 8, generator=generator, dtype=torch.float64).to(dtype)
    angles = 3 * torch.randn(batch, 1, 5, width // 2, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "batch"), [(8, 1), (4, 2)])
def test_pairs_turn_like_complex_numbers(width: int, batch: int, interleaved: bool) -> None:
    x, cos, sin = _case(width, batch)
    y = rotate(x, cos, sin, interleaved=interleaved)
    half = width // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    for i, (first, second) in enumerate(pairs):
        turned = torch.complex(x[..., first], x[..., second]) * torch.complex(cos, sin)[..., i]
        torch.testing.assert_close(torch.complex(y[..., first], y[..., second]), turned)
    assert torch.equal(y[..., width:], x[..., width:])
    assert torch.autograd.gradcheck(lambda part: rotate(part, cos, sin, interleaved=interleaved), x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_half_precision_is_rounded_once(interleaved: bool) -> None:
    x, cos, sin = _case(8, 1, torch.bfloat16)
    tables = cos.float(), sin.float()
    y = rotate(x, *tables, interleaved=interleaved)
    exact = rotate(x.detach().float(), *tables, interleaved=interleaved)
    assert torch.equal(y, exact.bfloat16())
    y.backward(torch.ones_like(y))
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotating_a_few_tokens_gives_the_same(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    angles = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(2)) * 9
    expected = rotate(x, angles.cos(), angles.sin())
    found = rotate_few(x, *doubled(angles.cos(), angles.sin()))
    assert found.dtype == dtype and torch.equal(found, expected)


# (b, s, groups, queries of a group, d), pairs, True if samples have their own positions
FUSED = ((2, 5, 2, 3, 8), 4, True)


def _fused(case: tuple, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """A projection, cosines and sines, and gradients of queries, keys and values in layouts that attention returns."""
    (batch, length, groups, queries, size), pairs, is_packed = case
    generator = torch.Generator().manual_seed(6)
    qkv = torch.randn(batch, length, groups, queries + 2, size, generator=generator, dtype=torch.float64).to(dtype)
    angles = 9 * torch.rand(batch if is_packed else 1, 1, length, pairs, generator=generator)
    heads = (groups * queries, groups, groups)
    gradients = [torch.randn(batch, length, n, size, generator=generator).to(dtype).transpose(1, 2) for n in heads]
    return qkv.requires_grad_(), [angles.cos(), angles.sin()], gradients


def test_torch_knows_the_compiled_rotations(compiled: Library) -> None:
    qkv, angles, gradients = _fused(FUSED, torch.float64)
    table = [part.double() for part in angles]
    query, key, _ = (part.detach().requires_grad_() for part in gradients)
    operations = torch.ops.megatron
    torch.library.opcheck(operations.rotary.default, (query, key, *table, True, False))
    torch.library.opcheck(operations.rotary_split.default, (qkv, *table, False))
    torch.library.opcheck(operations.rotary_join.default, (*gradients, *table, False))
    for sums_dtype in (None, torch.float32):
        torch.library.opcheck(operations.join_heads.default, (*(part.detach() for part in gradients), sums_dtype))
    assert torch.autograd.gradcheck(lambda x: operations.rotary_split(x, *table, True), qkv)
    assert torch.autograd.gradcheck(lambda one, other: operations.rotary(one, other, *table, False, True), (query, key))
