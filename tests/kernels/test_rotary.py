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
def test_strided_queries_of_a_fused_product(interleaved: bool) -> None:
    x, cos, sin = _case(8, 1)
    strided = x.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).requires_grad_()  # [b, a, s, d]
    y, expected = rotate(strided, cos, sin, interleaved=interleaved), rotate(x, cos, sin, interleaved=interleaved)
    gradient = torch.randn(y.shape, dtype=y.dtype)
    y.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(y, expected) and torch.equal(strided.grad, x.grad)


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


def test_compiled_rotation_refuses_what_does_not_fit(compiled: Library) -> None:
    x, table = torch.zeros(2, 3, 5, 8), torch.zeros(1, 1, 5, 4)
    rotary, split = torch.ops.megatron.rotary, torch.ops.megatron.rotary_split
    with pytest.raises(RuntimeError, match=r"at most 4 pairs, for 2 samples of 5 tokens, not \[1, 1, 4, 4\]"):
        rotary(x, x, table[:, :, 1:], table[:, :, 1:], False, False)
    with pytest.raises(RuntimeError, match="must both be float32 or Float, not Double and Double"):
        rotary(x, x, table.double(), table.double(), False, False)
    with pytest.raises(RuntimeError, match=r"queries and keys must be .*, not \[2, 3, 5, 8\] Float .* \[2, 3, 4, 8\]"):
        rotary(x, x[:, :, 1:], table, table, False, False)
    with pytest.raises(RuntimeError, match=r"queries of a group \+ 2, d\], not \[2, 3, 5, 8\]"):
        split(x, table, table, False)
    with pytest.raises(RuntimeError, match="must be a multiple of those of keys and values, not 3, 2 and 2"):
        torch.ops.megatron.rotary_join(x, x[:, :2], x[:, :2], table, table, False)
    with pytest.raises(RuntimeError, match="must be a multiple of those of keys and values, not 3, 2 and 2"):
        torch.ops.megatron.join_heads(x, x[:, :2], x[:, :2], None)
