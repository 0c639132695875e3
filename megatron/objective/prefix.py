"""Next-token prediction after a random prefix, and weights for how seldom a position is predicted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.data.loader import Batch
from megatron.objective.language_model import LanguageModelObjective


@dataclass(frozen=True)
class PrefixObjective(LanguageModelObjective):
    """Cross-entropy of the next token, divided by the number of tokens that prefixes leave on average.

    Every target then counts the same, whether its micro-batch has long or short prefixes. What is logged and evaluated
    stays the plain mean over the tokens that the loss mask keeps.

    Args:
        on_targets_only: whether the loss mask leaves out the prefixes; a sample of s tokens keeps (s + 1) / 2 labels on
            average, since a prefix ends at each of its positions equally often.
        reweights_positions: weigh the label of position t, counted from 0, by 2 (s - t) / (s + 1): a late position is a
            target more often than an early one. The weights of s tokens sum to s; those of targets to (s + 2) / 3 on
            average.

    Source: bigscience Megatron-DeepSpeed `megatron/model/gpt_model.py` (`get_cross_entropy`) and `megatron/utils.py`
    (`reweight_loss_mask_`).
    """

    on_targets_only: bool = False
    reweights_positions: bool = False

    def token_count(self, batch: Batch) -> float:
        """What the loss sum of a micro-batch is divided by."""
        samples, length = batch.loss_mask.shape
        if not self.on_targets_only:
            return float(samples * length)
        return samples * ((length + 2) / 3 if self.reweights_positions else (length + 1) / 2)

    def position_weights(self, mask: torch.Tensor) -> torch.Tensor | None:
        """The weight of each position. Shapes: mask `[b, s]`; result `[s]`."""
        if not self.reweights_positions:
            return None
        length = mask.shape[1]
        return torch.arange(length, 0, -1, dtype=torch.float32, device=mask.device) * (2 / (length + 1))
