"""Sums over frequent tokens and softmax of huge scores, on each device."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.kernels.attention.softmax import scaled_softmax
from megatron.kernels.choice import Implementation
from megatron.kernels.embedding import lookup
from megatron.kernels.native.library import Library
from tests.kernels.devices.checks import DEVICES, same_bits

CSRC, TORCH = Implementation.CSRC, Implementation.TORCH


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("implementation", [TORCH, CSRC])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_frequent_token_is_summed_in_float32(
    compiled: Library, dtype: torch.dtype, implementation: Implementation, device: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.zeros(50, 24, dtype=dtype, device=device, requires_grad=True)
    for count, first_row, is_whole in ((1000, 0, True), (4000, 0, True), (4000, 30, False), (0, 30, False)):
        ids = torch.randint(0, 50 if is_whole else 100, (4, 1500), generator=generator)
        ids.view(-1)[torch.randperm(6000, generator=generator)[:count]] = 37
        gradient = (1 + torch.randn(4, 1500, 24, generator=generator)).to(dtype)
        own = (ids >= first_row) & (ids < first_row + 50)
        exact = torch.zeros(50, 24, dtype=torch.float64).index_add_(0, ids[own] - first_row, gradient[own].double())
        results = []
        for _ in range(2):
            rows = lookup(weight, ids.to(device), first_row=first_row, is_whole=is_whole, implementation=implementation)
            results += torch.autograd.grad(rows, weight, gradient.to(device))
        errors = (results[0].cpu().double() - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-9)
        assert results[0].dtype == dtype and float(errors.max()) < 5e-3
        assert same_bits(*results)
    nothing = lookup(weight, torch.zeros(0, 3, dtype=torch.int64, device=device), implementation=implementation)
    assert not torch.autograd.grad(nothing, weight, nothing)[0].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [7, 64, 1031, 8203])
def test_softmax_of_huge_finite_scores(compiled: Library, keys: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(keys)
    drawn = torch.randn(2, 2, 3, keys, generator=generator)
    drawn[0, 0, 0] = drawn[0, 0, 0, 0]  # equal scores
    drawn[0, 0, 1] = -drawn[0, 0, 1].abs() - 0.5  # all far below zero
    mask = torch.rand(2, 1, 3, keys, generator=generator) < 0.3
    mask[..., 0] = False
    bias = torch.randn(1, 2, 1, keys, generator=generator)
    gradient = torch.randn(drawn.shape, generator=generator).to(dtype)
    for size, scale, (causal, has_mask, has_bias) in itertools.product(
        (1e3, 1e8, 1e10, 1e15, 1e30), (0.37, -1.7), itertools.product((False, True), repeat=3)
    ):
        scores = (drawn * size).to(dtype)
        results = []
        for implementation, place in ((TORCH, "cpu"), (CSRC, device)):
            own = scores.to(place).requires_grad_()
            options = {"mask": mask.to(place) if has_mask else None, "bias": bias.to(place) if has_bias else None}
            y = scaled_softmax(own, scale, causal=causal, **options, implementation=implementation)
            results.append([y.detach().cpu(), torch.autograd.grad(y, own, gradient.to(place))[0].cpu()])
        (expected, of_expected), (found, of_found) = results
        where = f"scores of {size:g} times {scale}, causal {causal}, mask {has_mask}, bias {has_bias}"
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found.float().sum(-1), torch.ones(2, 2, 3), atol=tolerance, rtol=0, msg=where)
        if not has_bias:  # it may be added before or after the product is rounded, which is worth a factor here
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, msg=where)
        assert of_found.isfinite().all() and of_expected.isfinite().all(), where
