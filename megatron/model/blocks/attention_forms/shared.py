"""Attention over samples that ranks share: they exchange positions for heads, and pass keys and values in a ring."""

from __future__ import annotations

import torch

from megatron.errors import ConfigError
from megatron.model.blocks.attention_forms.form import Heads, Scoring
from megatron.model.blocks.attention_forms.whole import WholeAttention
from megatron.model.interface.step_context import MaskKind, StepContext
from megatron.parallel.mesh import Axis
from megatron.parallel.sequence.ring import RingPlan
from megatron.parallel.sequence.tiles import Visibility
from megatron.parallel.sequence.ulysses import to_heads, to_positions
from megatron.parallel.tensor.direct_module import DirectModule


class SharedAttention(DirectModule):
    """Attention of this rank's tokens to the tokens of all ranks that share its samples; in a micro-batch that is not
    shared, each rank has its own samples.
    """

    def __init__(self, alone: Scoring, exchanged: Scoring, ring: Axis) -> None:
        super().__init__()
        self.alone = WholeAttention(alone)
        self.shared = RingAttention(exchanged) if ring.size > 1 else WholeAttention(exchanged)

    def attend(self, heads: Heads, context: StepContext) -> torch.Tensor:
        """Shapes: query `[b, a/t, s/ru, d]`, key and value `[b, g/t, s/ru, d]`; result as query."""
        if context.split is None:
            return self.alone.attend(heads, context)
        query, key, value = heads
        ulysses = context.split.ulysses
        attended = self.shared.attend(to_heads(query, key, value, ulysses), context)  # [b, a/tu, s/r, d]
        return to_positions(attended, ulysses)


class RingAttention(DirectModule):
    """Attention to the keys of all ranks of a ring."""

    def __init__(self, scoring: Scoring) -> None:
        super().__init__()
        self.scoring = scoring

    def attend(self, heads: Heads, context: StepContext) -> torch.Tensor:
        """Shapes: query `[b, a/tu, s/r, d]`, key and value `[b, g, s/r, d]`; result as query."""
        query, key, value = heads
        sinks = self.scoring.sinks(query) if self.scoring.has_sinks else None
        return self._plan(query, context).attend(query, key, value, sinks)

    def _plan(self, query: torch.Tensor, context: StepContext) -> RingPlan:
        """This rank's share of a micro-batch's attention, for all layers with the same bounds.

        Raises:
            ConfigError: the ranks share no samples, or the samples have prefixes.
        """
        split, length, slopes = context.split, query.shape[2], self.scoring.slopes
        if split is None or context.prefix_mask is not None:
            raise ConfigError(
                "Attention in a ring (--cp-comm-type p2p) requires samples that are split over ranks and have no "
                "prefixes. Use --cp-comm-type a2a."
            )
        attention = self.scoring.partial(context)
        in_blocks = attention.holds_scores(query)
        seen = Visibility(self.scoring.bidirectional, self.scoring.window, bool(slopes), in_blocks)
        segments = context.segment_ids if context.mask is MaskKind.DOCUMENTS else None
        return context.once(
            ("ring", attention, seen, slopes, length),
            lambda: RingPlan.of(split, length * split.ring.size, segments, attention, seen, slopes, query.device),
        )
