"""Rotation against a product of complex numbers, in both conventions and partial widths."""

from __future__ import annotations

import pytest
import torch

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
