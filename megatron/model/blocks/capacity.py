"""The capacity of experts: how many tokens of a micro-batch one expert takes, and which tokens it drops.

All shapes follow from the number of tokens, and nothing is read by the host, so a CUDA graph can hold it.
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
    """Which tokens the experts of a layer take.

    An expert takes `factor * n * k / e` of the n tokens of a micro-batch, rounded up, if each chooses k of e experts,
    and at least `--moe-min-capacity`. It prefers those with the largest weights (`probs`), or those that come first
    (`position`); the others pass it by and are left with what their other experts compute, without new weights.

    Tokens compete within their micro-batch, so what is dropped depends on its size, but not on the layout that trains
    it: ranks that share samples decide together. Where a sample must not depend on those beside it, which are generated
    texts and scored queries, nothing is dropped (`StepContext.drops_tokens`).

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
        """The tokens that an expert takes of a micro-batch."""
        factor = self.training_factor if training else self.evaluation_factor
        share = math.ceil((factor or 0.0) * tokens * self.top_k / self.experts)
        return min(max(share, self.least, 1), tokens)

    def slots(
        self, weights: torch.Tensor, experts: torch.Tensor, context: StepContext, *, training: bool
    ) -> Slots | None:
        """The places of the choices of this rank's tokens; None where nothing is dropped.

        Shapes: weights and experts `[n, k]`.
        """
        if not self.is_on or not context.drops_tokens or context.caches is not None:
            return None
        weights, split = weights.detach(), context.split
        queue = self._places(weights, experts)
        positions = context.positions(len(experts) // len(context.sample_ids))
        if split is None or positions is None:
            capacity = self.of_tokens(len(experts), training=training)
            return Slots(queue.clamp(max=capacity), capacity)
        # A rank's own queue is the whole one without the tokens of others: what is kept comes first in both.
        capacity = self.of_tokens(len(experts) * split.size, training=training)
        is_kept = self._whole_places(weights, experts, positions.expand(len(context.sample_ids), -1), split) < capacity
        return Slots(torch.where(is_kept, queue, capacity), capacity)

    def _places(self, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The place of every choice in the queue of its expert, without end. Shapes: `[n, k]` to the same."""
        chosen = experts.flatten()
        if self.by_position:
            ordered, pairs = chosen.sort(stable=True)
        else:
            best_first = weights.flatten().argsort(descending=True, stable=True)
            ordered, order = chosen[best_first].sort(stable=True)
            pairs = best_first[order]
        numbers = torch.arange(pairs.numel(), device=pairs.device)
        first = torch.searchsorted(ordered, torch.arange(self.experts, device=pairs.device))  # [e]
        places = torch.empty_like(pairs)
        places[pairs] = numbers - first[ordered]
        return places.view(experts.shape)

    def _whole_places(
        self, weights: torch.Tensor, experts: torch.Tensor, positions: torch.Tensor, split: SequenceSplit
    ) -> torch.Tensor:
        """The places of this rank's choices in the queues of the whole samples, which ranks share.

        Shapes: weights and experts `[n, k]` to the same; positions `[b, s]`.
        """
        tokens, length = len(experts), positions.shape[1] * split.size
        samples = torch.arange(len(positions), device=experts.device).unsqueeze(1)
        arrival = (samples * length + positions).reshape(-1, 1)  # [n, 1]
        own = torch.cat([value.to(torch.float64) for value in (weights, experts, arrival)], dim=1)
        whole = gather_from(gather_from(own, split.ulysses, dimension=0), split.ring, dimension=0)
        order = whole[:, -1].argsort()
        in_order, k = whole[order], experts.shape[1]
        places = torch.empty(len(whole), k, dtype=torch.int64, device=experts.device)
        places[order] = self._places(in_order[:, :k], in_order[:, k : 2 * k].to(torch.int64))
        place = split.ring.rank * split.ulysses.size + split.ulysses.rank
        return places.narrow(0, place * tokens, tokens)
