"""Attention with sinks is that of transformers' gpt-oss, in results and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from megatron.kernels.attention.partial import PartialAttention
from megatron.kernels.attention.sinks import sink_attention

FORMS = {
    "fused": (PartialAttention(0.25), torch.float32, "cpu"),
    "explicit": (PartialAttention(0.25, explicit=True), torch.float32, "cpu"),
    "bf16": (PartialAttention(0.25), torch.bfloat16, "cpu"),
    "cuda": (PartialAttention(0.25), torch.bfloat16, "cuda"),
}


@pytest.mark.parametrize(
    "form", [pytest.param(name, marks=pytest.mark.gpu) if name == "cuda" else name for name in FORMS]
)
@pytest.mark.parametrize("window", [None, 5])
def test_attention_is_that_of_transformers(form: str, window: int | None) -> None:
    attention, dtype, device = FORMS[form]
    generator = torch.Generator().manual_seed(1)
    query, key, value, gradient = (
        torch.randn(2, count, 24, 16, generator=generator).to(device, dtype) for count in (4, 2, 2, 4)
    )
    sinks = torch.randn(4, generator=generator).to(device, dtype)
    distance = torch.arange(24, device=device)[:, None] - torch.arange(24, device=device)
    hidden = (distance < 0) | (distance >= (window or 24))
    bias = torch.zeros(1, 1, 24, 24, device=device).masked_fill(hidden, -torch.inf)

    theirs = [part.double().requires_grad_() for part in (query, key, value, sinks)]
    module = SimpleNamespace(num_key_value_groups=2, sinks=theirs[3], training=True)
    expected = eager_attention_forward(module, *theirs[:3], bias.double(), 0.25)[0].transpose(1, 2)
    expected.backward(gradient.double())

    ours = [part.requires_grad_() for part in (query, key, value, sinks)]
    found = sink_attention(*ours, attention, causal=window is None, bias=None if window is None else bias)
    found.backward(gradient)
    limit = 1e-6 if dtype == torch.float32 else 1.6e-2
    assert (found - expected).abs().max() < limit * expected.abs().max()
    for own, true in zip(ours, theirs, strict=True):
        assert own.grad is not None and true.grad is not None
        assert (own.grad - true.grad).abs().max() < limit * true.grad.abs().max()


def test_a_query_that_sees_no_key_attends_to_its_sink_only() -> None:
    query, key, value = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
    sinks = torch.zeros(2, requires_grad=True)
    bias = torch.zeros(1, 1, 6, 6)
    bias[..., 2, :] = -torch.inf
    out = sink_attention(query, key, value, sinks, PartialAttention(0.3), bias=bias)
    out.square().sum().backward()
    assert (out[:, :, 2] == 0).all()
    assert query.grad is not None and (query.grad[:, :, 2] == 0).all() and query.grad.isfinite().all()
