"""The capacity of experts: the number of tokens of a micro-batch that one expert accepts, and the tokens it drops.

All shapes follow from the number of tokens and the host reads no values, so CUDA graphs can capture it.
"""

from __future__ import annotations

import math

import torch

from megatron.config import ModelConfig
from megatron.config.architecture.feed_forward import BY_POSITION
from megatron.model.interface.step_context import StepContext
from megatron.parallel.expert.order import Slots
from megatron.parallel.sequence.split import SequenceSplit
from megatron.parallel.tensor.collectives import gather_from


class ExpertCapacity:
    """Decides which tokens the experts of a layer accept.

    If each of the n tokens of a micro-batch chooses k of e experts, an expert accepts `factor * n * k / e` tokens,
    rounded up, and at least `--moe-min-capacity`: those with the largest weights (`probs`), or the first ones
    (`position`). It drops the others, whose remaining experts keep their weights.

    Tokens compete within their micro-batch, so drops depend on its size, but not on the layout: ranks that share
    samples decide together. Generated texts and scored queries must not depend on other samples of the batch, so they
    drop nothing (`StepContext.drops_tokens`).

    Source: Lepikhin et al., "GShard", 2020, section 2.2; NVIDIA Megatron-LM `megatron/core/transformer/moe/
    moe_utils.py`, `get_capacity` and `apply_router_token_dropping`; DeepSpeed `moe/sharded_moe.py`, `_capacity`.
    """

    def __init__(self, config: ModelConfig, experts: int) -> None:
        self.experts, self.top_k = experts, config.moe_router_topk
        self.is_on = config.drops_tokens
        self.training_factor = config.moe_expert_capacity_factor
        self.evaluation_factor = config.moe_eval_capacity_factor or self.training_factor
        self.least = config.moe_min_capacity
        self.by_position = config.moe_token_drop_policy == BY_POSITION

    def of_tokens(self, tokens: int, *, training: bool) -> int:
        """The capacity of an expert for a micro-batch of this many tokens."""
        factor = self.training_factor if training else self.evaluation_factor
        share = math.ceil((factor or 0.0) * tokens * self.top_k / self.experts)
        return min(max(share, self.least, 1), tokens)

    def slots(
        self, weights: torch.Tensor, experts: torch.Tensor, context: StepContext, *, training: bool
    ) -> Slots | None:
        """The slots of this rank's choices in the experts' queues; None if nothing is dropped.

        Shapes: weights and experts `[n, k]`.
        """
        if not self.is_on or not context.drops_tokens or context.caches is not None:
            return None
        weights, split = weights.detach(), context.split
        queue = self._queue_positions(weights, experts)
        positions = context.positions(len(experts) // len(context.sample_ids))
        if split is None or positions is None:
            capacity = self.of_tokens(len(experts), training=training)
            return Slots(queue.clamp(max=capacity), capacity)
        # A rank's queue is the global queue without the other ranks' tokens, in the same order: kept tokens come first.
        capacity = self.of_tokens(len(experts) * split.size, training=training)
        positions = positions.expand(len(context.sample_ids), -1)
        is_kept = self._global_queue_positions(weights, experts, positions, split) < capacity
        return Slots(torch.where(is_kept, queue, capacity), capacity)

    def _queue_positions(self, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The position of every choice in its expert's unbounded queue. Shapes: `[n, k]` to the same."""
        chosen = experts.flatten()
        if self.by_position:
            ordered, pairs = chosen.sort(stable=True)
        else:
            best_first = weights.flatten().argsort(descending=True, stable=True)
            ordered, order = chosen[best_first].sort(stable=True)
            pairs = best_first[order]
        numbers = torch.arange(pairs.numel(), device=pairs.device)
        first = torch.searchsorted(ordered, torch.arange(self.experts, device=pairs.device))  # [e]
        queue_positions = torch.empty_like(pairs)
        queue_positions[pairs] = numbers - first[ordered]
        return queue_positions.view(experts.shape)

    def _global_queue_positions(
        self, weights: torch.Tensor, experts: torch.Tensor, positions: torch.Tensor, split: SequenceSplit
    ) -> torch.Tensor:
        """The positions of this rank's choices in the queues over the whole samples, which ranks share.

        Shapes: weights and experts `[n, k]` to the same; positions `[b, s]`.
        """
        tokens, length = len(experts), positions.shape[1] * split.size
        samples = torch.arange(len(positions), device=experts.device).unsqueeze(1)
        arrival = (samples * length + positions).reshape(-1, 1)  # [n, 1]
        local = torch.cat([value.to(torch.float64) for value in (weights, experts, arrival)], dim=1)
        gathered = gather_from(gather_from(local, split.ulysses, dimension=0), split.ring, dimension=0)
        order = gathered[:, -1].argsort()
        in_order, k = gathered[order], experts.shape[1]
        queue_positions = torch.empty(len(gathered), k, dtype=torch.int64, device=experts.device)
        queue_positions[order] = self._queue_positions(in_order[:, :k], in_order[:, k : 2 * k].to(torch.int64))
        rank = split.ring.rank * split.ulysses.size + split.ulysses.rank
        return queue_positions.narrow(0, rank * tokens, tokens)
