"""The dropout of hidden states: its sites, and what each site drops in a micro-batch."""

from __future__ import annotations

import torch

from megatron.kernels.dropout_add import Dropout
from megatron.model.interface.step_context import StepContext
from megatron.parallel.rng import hidden_dropout

EMBEDDING_SITE = 0  # then two per block: attention and feed-forward


def dropout_at(site: int, probability: float, hidden: torch.Tensor, context: StepContext) -> Dropout | None:
    """What training drops at a site; None if nothing.

    Shapes: hidden `[b, s, h]`; rows of the result `[b, s]`.
    """
    return hidden_dropout(
        probability,
        seed=context.seed,
        layer=site,
        sample_ids=context.sample_ids.to(hidden.device),
        length=hidden.shape[1],
        first_position=context.position_offset,
    )
