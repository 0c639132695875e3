"""Operations with several implementations give the same numbers, and the report names those in use."""

from __future__ import annotations

import pytest
import torch

from megatron import kernels


def _heads(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 3, 7, 4, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("masked", [None, 1, 2])
def test_explicit_attention_equals_the_fused_one(masked: int | None) -> None:
    bias = None
    if masked is not None:
        visible = torch.ones(masked, 1, 7, 7, dtype=torch.bool).tril()
        visible[-1, 0, 4:, :4] = False
        bias = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, float("-inf"))
    gradients = []
    for fused in (True, False):
        heads = _heads()
        if fused:
            y = kernels.attention(*heads, bias=bias, causal=bias is None)
        else:
            y = kernels.explicit_attention(*heads, lambda x: x, bias=bias)
        (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
        gradients.append([y.detach(), *(head.grad for head in heads)])
    for fused_result, explicit_result in zip(*gradients, strict=True):
        torch.testing.assert_close(fused_result, explicit_result)


def test_explicit_attention_drops_probabilities() -> None:
    query, key, value = _heads()
    assert not kernels.explicit_attention(query, key, value, torch.zeros_like).any()


def test_masked_scale() -> None:
    x, keep = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True])
    assert kernels.masked_scale(x, keep, 2.0).tolist() == [2.0, 0.0, 6.0]
    assert kernels.masked_scale(x.bfloat16(), keep, 2.0).dtype == torch.bfloat16


def test_report_names_every_operation_once() -> None:
    report = kernels.kernel_report()
    operations = [choice.operation for choice in report]
    assert len(set(operations)) == len(operations) >= 5
    assert all(choice.implementation and choice.note for choice in report)


def test_is_installed_does_not_import() -> None:
    assert kernels.is_installed("json")
    assert not kernels.is_installed("no_such_package_here")
    assert not kernels.is_installed("no_such_package_here.part")
