"""Attention with sinks: an extra logit per head in the softmax denominator, so that weights may sum to less than 1.

A sink is a key with value 0 that is visible to every query. It is merged with `PartialAttention` like any other block
of keys, and backward takes the merged result; no key is appended.

Source: OpenAI, "gpt-oss-120b and gpt-oss-20b model card", 2025, section 2.2; Miller, "Attention is off by one", 2023.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megatron.kernels.attention.partial import PartialAttention, merge_


def sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    attention: PartialAttention,
    *,
    causal: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention whose softmax has one more logit than keys.

    Shapes: query `[b, a, q, d]`, key and value `[b, g, k, d]`, sinks `[a]`, bias `[b or 1, 1 or a, q, k]`; result as
        query.

    Args:
        causal: query i attends to the keys up to i; both are equally many.
    """
    return _SinkAttention.apply(query, key, value, sinks, attention, causal, bias)  # type: ignore[no-any-return]


def only_sinks(query: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and log denominator of attention to the sinks alone, as a start for `merge_`.

    Shapes: query `[b, a, q, d]`, sinks `[a]`; results `[b, a, q, d]` with the strides of `[b, q, a, d]`, so that the
        next projection needs no copy, and `[b, a, q]`, both float32.
    """
    out = torch.zeros_like(query.transpose(1, 2), dtype=torch.float32, memory_format=torch.contiguous_format)
    return out.transpose(1, 2), sinks.float().view(1, -1, 1).repeat(query.shape[0], 1, query.shape[2])


def sink_gradient(
    gradient: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """The gradient of the sinks.

    Shapes: gradient and out `[b, a, q, d]`, logsumexp `[b, a, q]`, sinks `[a]`; result as sinks.

    Args:
        out, logsumexp: merged results of all keys and the sink.
    """
    share = (sinks.float().view(1, -1, 1) - logsumexp).exp()  # [b, a, q]
    return -(share * (gradient.float() * out.float()).sum(dim=-1)).sum(dim=(0, 2)).to(sinks.dtype)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, attention, causal, bias):  # type: ignore[no-untyped-def]
        out, logsumexp = only_sinks(query, sinks)
        out, logsumexp = merge_(out, logsumexp, *attention.forward(query, key, value, causal=causal, bias=bias))
        result = out.to(query.dtype)
        ctx.attention, ctx.causal = attention, causal
        ctx.save_for_backward(query, key, value, sinks, result, logsumexp, bias)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        query, key, value, sinks, out, logsumexp, bias = ctx.saved_tensors
        of_heads = ctx.attention.backward(gradient, query, key, value, out, logsumexp, causal=ctx.causal, bias=bias)
        return *of_heads, sink_gradient(gradient, out, logsumexp, sinks), None, None, None
