"""Grouped products equal a product per group; empty groups get zeros; torch's kernel gives the same."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels import grouped
from megatron.kernels.grouped import grouped_linear

ROWS, INPUT, OUTPUT = 24, 16, 8
ENDS = {"all filled": [3, 10, 11, 24], "empty ones": [0, 10, 10, 24, 24], "one group": [0, 24, 24], "one": [24]}


def operands(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    x, weight = torch.randn(ROWS, INPUT, generator=generator), torch.randn(count, OUTPUT, INPUT, generator=generator)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def expected(x: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> list[torch.Tensor]:
    """Result and gradients in float64, row by row."""
    rows, matrices = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    group_of = [next(group for group, end in enumerate(ends) if row < end) for row in range(ROWS)]
    result = torch.stack([matrices[group] @ row for group, row in zip(group_of, rows, strict=True)])
    result.square().sum().backward()
    return [result.detach(), rows.grad, matrices.grad]  # type: ignore[list-item]


def found(x: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> list[torch.Tensor]:
    result = grouped_linear(x, weight, torch.tensor(ends))
    result.square().sum().backward()
    return [result.detach(), x.grad, weight.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("dtype, ratio", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kernel", [False, True], ids=["loop", "kernel"])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_result_and_gradients(
    ends: list[int], kernel: bool, dtype: torch.dtype, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "_has_grouped_kernel", lambda x, weight: kernel)
    x, weight = operands(len(ends), dtype)
    for value, known in zip(found(x, weight, ends), expected(x, weight, ends), strict=True):
        assert (value.double() - known).abs().max() <= ratio * known.abs().max()
    empty = [group for group, end in enumerate(ends) if end == (ends[group - 1] if group else 0)]
    assert not weight.grad[empty].any()


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, weight = operands(4, torch.float32)
    grouped_linear(x.detach(), weight, torch.tensor(ENDS["all filled"])).sum().backward()
    assert weight.grad is not None
    weight.grad = None
    grouped_linear(x, weight.detach(), torch.tensor(ENDS["all filled"])).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_torchs_kernel_is_for_bfloat16_on_a_gpu() -> None:
    x, weight = operands(2, torch.bfloat16)
    assert not grouped._has_grouped_kernel(x, weight)
