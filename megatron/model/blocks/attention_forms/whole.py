"""Attention between the tokens of whole samples, plain or bounded by documents, prefixes, windows and linear biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron.kernels.attention.bounded import AttentionPlan, plan_attention
from megatron.kernels.attention.bounds import Bounds, local_bias
from megatron.model.blocks.attention_forms.form import Heads, Scoring
from megatron.model.blocks.attention_forms.inner import build_inner
from megatron.model.interface.step_context import MaskKind, Recompute, StepContext
from megatron.parallel.tensor.direct_module import DirectModule


class WholeAttention(DirectModule):
    """Attention to the earlier tokens of the sample, or to all of them, within the bounds of layer and micro-batch."""

    def __init__(self, scoring: Scoring) -> None:
        super().__init__()
        self.scoring, self.inner = scoring, build_inner(scoring)
        self.has_bounds = scoring.window is not None or bool(scoring.slopes) or scoring.softcap is not None

    def attend(self, heads: Heads, context: StepContext) -> torch.Tensor:
        """Shapes: query `[b, a/t, s, d]`, key and value `[b, g/t, s, d]`; result as query."""
        query, key, value = heads
        plan = bias = None
        if self.has_bounds or context.bounds_attention:
            plan, bias = self._bounds(query, context)
        run: Callable[..., torch.Tensor]
        options: tuple[Any, ...]
        if plan is not None:
            run, options = plan.attend, (self.scoring.scale,)
        else:
            causal = bias is None and query.shape[2] > 1 and not self.scoring.bidirectional
            run, options = self.inner.attend, (causal, bias, context)
        if context.recompute is Recompute.ATTENTION and self.training and torch.is_grad_enabled():
            return checkpoint(run, query, key, value, *options, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return run(query, key, value, *options)

    def _bounds(self, query: torch.Tensor, context: StepContext) -> tuple[AttentionPlan | None, torch.Tensor | None]:
        """A plan that computes only visible scores, or else a bias of the scores."""
        drops = self.training and self.scoring.dropout > 0
        if not (drops or self.scoring.has_sinks or torch.compiler.is_compiling()):
            plan = bounded_plan(context, query, self.scoring)
            if plan is not None:
                return plan, None
        return None, score_bias(context, query, self.scoring)


def score_bias(context: StepContext, query: torch.Tensor, scoring: Scoring) -> torch.Tensor | None:
    """The bias of the scores of a micro-batch; None if the plain causal mask, or no mask at all, suffices.

    It is built once per micro-batch for all layers with the same window and slopes.

    Shapes: query `[b, a/t, s, d]`; result `[b or 1, 1 or a/t, s, s]`. A mask has the query's dtype; with slopes it is
        float32 on a CPU.
    """
    length, window, slopes = query.shape[2], scoring.window, scoring.slopes
    separate = context.mask is MaskKind.DOCUMENTS
    if window is not None and window >= length:
        window = None
    if not (separate or window or slopes or context.prefix_mask is not None):
        return None

    def build() -> torch.Tensor:
        bias = local_bias(
            query, length, window, slopes, context.prefix_mask, bidirectional=scoring.bidirectional
        )  # [1 or b, 1 or a/t, s, s]
        if separate and context.segment_ids is not None:
            segments = context.segment_ids
            foreign = segments.unsqueeze(2) != segments.unsqueeze(1)  # [b, s, s]
            bias = bias.masked_fill(foreign.unsqueeze(1), float("-inf"))
        return bias

    return context.once(("score bias", window, slopes, length, query.dtype), build)


def bounded_plan(context: StepContext, query: torch.Tensor, scoring: Scoring) -> AttentionPlan | None:
    """Attention of a micro-batch without s x s biases and without dropout; None if it needs `score_bias`.

    Shapes: query `[b, a/t, s, d]`.
    """
    window, slopes, softcap = scoring.window, scoring.slopes, scoring.softcap
    segments = context.segment_ids if context.mask is MaskKind.DOCUMENTS else None
    return context.once(
        ("attention plan", window, slopes, softcap, query.shape[2], query.dtype),
        lambda: plan_attention(
            query, Bounds(segments, window, slopes, context.prefix_mask, scoring.bidirectional), softcap
        ),
    )
