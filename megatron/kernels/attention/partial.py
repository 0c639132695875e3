"""Attention to blocks of keys, whose results are merged into attention to all keys.

A result comes with the logarithm of its softmax denominator, which weights it when results are merged. Given the merged
result and denominator, backward of a block returns exactly the block's share of the gradients.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Liu et al., "Ring attention", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.kernels.attention.dense import repeated_heads

_flash = torch.ops.aten
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PartialAttention:
    """Attention to a block of keys.

    Args:
        scale: factor of the scores.
        softcap: scores become `softcap * tanh(score / softcap)`.
        explicit: use only torch's plain operations.
    """

    scale: float
    softcap: float | None = None
    explicit: bool = False

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool = False,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted sum of the values, and the logarithm of the softmax denominator; -inf for a query without
        visible keys.

        Shapes: query `[b, a, q, d]`, key and value `[b, g, k, d]`, bias `[b or 1, 1 or a, q, k]` float32; results as
        query and `[b, a, q]` float32.

        Args:
            causal: query i attends to the keys up to i; both are equally many.
        """
        if self._is_explicit(query, bias):
            return self._explicit(query, key, value, causal, bias)
        if query.is_cuda:
            return _cuda_flash(query, key, value, causal, self.scale)
        out, logsumexp = _flash._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=self.scale
        )
        if bias is not None:  # the kernel returns 0 there
            logsumexp = logsumexp.masked_fill((bias == -torch.inf).all(dim=-1), -torch.inf)
        return out, logsumexp

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        *,
        causal: bool = False,
        bias: torch.Tensor | None = None,
    ) -> Gradients:
        """This block's share of the gradients of queries, keys and values.

        Shapes: as in `forward`, gradient and out as query.

        Args:
            out, logsumexp: merged results of all visible keys.
        """
        if self._is_explicit(query, bias):
            return self._explicit_backward(gradient, query, key, value, out, logsumexp, causal, bias)
        if query.is_cuda:
            return _cuda_flash_backward(gradient, query, key, value, out, logsumexp, causal, self.scale)
        return _flash._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            gradient, query, key, value, out, logsumexp, 0.0, causal, attn_mask=bias, scale=self.scale
        )

    def holds_scores(self, query: torch.Tensor) -> bool:
        """True if all scores of a block are materialized, so that blocks must be small.

        Shapes: query `[b, a, q, d]`.
        """
        if self.explicit or self.softcap is not None:
            return True
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        return query.is_cuda and (not is_half or query.shape[-1] % 8 > 0 or query.shape[-1] > 256)

    def _is_explicit(self, query: torch.Tensor, bias: torch.Tensor | None) -> bool:
        return self.holds_scores(query) or (query.is_cuda and bias is not None)

    def _scores(
        self, query: torch.Tensor, key: torch.Tensor, causal: bool, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores in float32, and the hyperbolic tangents inside a soft-cap. Shapes: both `[b, a, q, k]`."""
        scores = (query.float() * self.scale) @ key.float().transpose(2, 3)
        shares = None
        if self.softcap is not None:
            shares = torch.tanh(scores / self.softcap)
            scores = shares * self.softcap
        if bias is not None:
            scores = scores + bias
        if causal:
            later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu_(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores, shares

    def _explicit(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads = query.shape[1]
        scores, _ = self._scores(query, repeated_heads(key, heads), causal, bias)
        logsumexp = scores.logsumexp(dim=-1)
        out = _probabilities(scores, logsumexp) @ repeated_heads(value, heads).float()
        return out.to(query.dtype), logsumexp

    def _explicit_backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        causal: bool,
        bias: torch.Tensor | None,
    ) -> Gradients:
        heads, groups = query.shape[1], key.shape[1]
        keys, wide = repeated_heads(key, heads), gradient.float()
        scores, shares = self._scores(query, keys, causal, bias)
        probabilities = _probabilities(scores, logsumexp)
        of_values = probabilities.transpose(2, 3) @ wide
        of_probabilities = wide @ repeated_heads(value, heads).float().transpose(2, 3)
        of_scores = probabilities * (of_probabilities - (wide * out.float()).sum(dim=-1, keepdim=True))
        if shares is not None:
            of_scores = of_scores * (1 - shares.square())
        of_scores = of_scores * self.scale
        query_gradient, of_keys = of_scores @ keys.float(), of_scores.transpose(2, 3) @ query.float()
        grouped = (part.unflatten(1, (groups, -1)).sum(dim=2).to(key.dtype) for part in (of_keys, of_values))
        return (query_gradient.to(query.dtype), *grouped)  # type: ignore[return-value]


def merge_(
    out: torch.Tensor, logsumexp: torch.Tensor, part: torch.Tensor, part_logsumexp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the result of further keys into a result in place; returns it with its denominator.

    Shapes: out and part `[b, a, q, d]`, out float32; logsumexps `[b, a, q]` float32, at most one of them -inf for
    each query.
    """
    total = torch.logaddexp(logsumexp, part_logsumexp)
    out.mul_((logsumexp - total).exp_().unsqueeze(-1)).add_(part * (part_logsumexp - total).exp_().unsqueeze(-1))
    return out, logsumexp.copy_(total)


def _probabilities(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """Shapes: `[b, a, q, k]` and `[b, a, q]` to `[b, a, q, k]`."""
    return (scores - logsumexp.masked_fill(logsumexp == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _cuda_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """CUDA's flash attention. Shapes: as in `PartialAttention.forward`."""
    heads = query.shape[1]
    keys, values = repeated_heads(key, heads), repeated_heads(value, heads)
    out, logsumexp, *_ = _flash._scaled_dot_product_flash_attention(query, keys, values, 0.0, causal, scale=scale)
    return out, logsumexp


def _cuda_flash_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    causal: bool,
    scale: float,
) -> Gradients:
    """Backward of CUDA's flash attention. Shapes: as in `PartialAttention.backward`."""
    heads, groups = query.shape[1], key.shape[1]
    keys, values = repeated_heads(key, heads), repeated_heads(value, heads)
    unused = torch.empty(0, dtype=torch.int64, device=query.device)
    lengths = (query.shape[2], key.shape[2])
    query_gradient, of_keys, of_values = _flash._scaled_dot_product_flash_attention_backward(
        gradient, query, keys, values, out, logsumexp.contiguous(), None, None, *lengths, 0.0, causal, unused, unused,
        scale=scale,
    )  # fmt: skip
    grouped = (part.unflatten(1, (groups, -1)).sum(dim=2) for part in (of_keys, of_values))
    return (query_gradient, *grouped)  # type: ignore[return-value]
