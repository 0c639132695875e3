"""Softmax attention to given keys: plain, with dropout, or with sinks."""

from __future__ import annotations

from typing import Any

import torch

from megatron.kernels.attention.dense import attention, explicit_attention
from megatron.kernels.attention.sinks import sink_attention
from megatron.kernels.dropout_add import Dropout
from megatron.model.blocks.attention_forms.form import Scoring
from megatron.model.interface.step_context import StepContext
from megatron.parallel.rng import attention_dropout, attention_seed, seeded
from megatron.parallel.tensor.direct_module import DirectModule


def build_inner(scoring: Scoring) -> InnerAttention:
    """Builds the inner attention that a layer's forms share."""
    if scoring.has_sinks:
        return AttentionWithSinks(scoring)
    return AttentionWithDropout(scoring) if scoring.dropout > 0 else InnerAttention(scoring)


class InnerAttention(DirectModule):
    """Scores, softmax, and the weighted sum of values."""

    def __init__(self, scoring: Scoring) -> None:
        super().__init__()
        self.scoring = scoring
        self.bounds: dict[str, Any] = {"softcap": scoring.softcap, "kernels": scoring.kernels}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        bias: torch.Tensor | None,
        context: StepContext,
    ) -> torch.Tensor:
        """Shapes: query `[b, a/t, s, d]`, key and value `[b, g/t, k, d]`, bias as of `attention`; result as query."""
        run = explicit_attention if context.explicit_attention else attention
        return run(query, key, value, self.scoring.scale, bias=bias, causal=causal, **self.bounds)


class AttentionWithDropout(InnerAttention):
    """Attention with dropout of the probabilities in training."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        bias: torch.Tensor | None,
        context: StepContext,
    ) -> torch.Tensor:
        if not self.training:
            return super().attend(query, key, value, causal, bias, context)
        scoring, bounds = self.scoring, {"bias": bias, "causal": causal, **self.bounds}
        if context.explicit_attention or not query.is_cuda:
            return explicit_attention(query, key, value, scoring.scale, dropout=self._dropout(query, context), **bounds)
        with seeded(attention_seed(context.seed, context.first_sample, scoring.layer, scoring.part), query.device):
            return attention(query, key, value, scoring.scale, dropout=scoring.dropout, **bounds)

    def _dropout(self, query: torch.Tensor, context: StepContext) -> Dropout | None:
        """The stateless dropout of the probabilities. Shapes: query `[b, a/t, s, d]`; rows `[b, a/t, s]`."""
        _, heads, queries, _ = query.shape
        return attention_dropout(
            self.scoring.dropout,
            keys=self.scoring.site.keys(context.seed),
            sample_ids=context.sample_ids.to(query.device),
            first_head=self.scoring.part * heads,
            heads=heads,
            queries=queries,
        )


class AttentionWithSinks(InnerAttention):
    """Attention whose softmax has one more logit than keys, so that the weights of the keys may sum to less than 1."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        bias: torch.Tensor | None,
        context: StepContext,
    ) -> torch.Tensor:
        sinks, partial = self.scoring.sinks(query), self.scoring.partial(context)
        return sink_attention(query, key, value, sinks, partial, causal=causal, bias=bias)
