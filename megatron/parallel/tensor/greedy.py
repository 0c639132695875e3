"""The most probable token where the vocabulary dimension of the logits is split across ranks."""

from __future__ import annotations

import torch

from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_reduce_max


def vocab_parallel_argmax(logits: torch.Tensor, axis: Axis, vocab_size: int) -> torch.Tensor:
    """The id of the largest logit of each row, the smallest id where several are equal; the same on every rank.

    Two maxima of one value per row are communicated instead of the logits.

    Shapes: logits `[..., v/t]`; result `[...]` int64.

    Args:
        vocab_size: columns from this id on are padding and never chosen.
    """
    columns = logits.shape[-1]
    first = axis.rank * columns
    valid = max(0, min(columns, vocab_size - first))
    if valid:
        largest, local = logits[..., :valid].max(dim=-1)
        largest, chosen = largest.float(), local + first
    else:  # this rank holds padding only
        largest = logits.new_full(logits.shape[:-1], float("-inf"), dtype=torch.float32)
        chosen = torch.full_like(largest, vocab_size, dtype=torch.int64)
    if axis.size > 1:
        everywhere = all_reduce_max(largest.clone(), axis)
        # The maximum of the negated ids is the smallest id; a rank whose own maximum is smaller offers none.
        offered = torch.where(largest == everywhere, -chosen, torch.full_like(chosen, -vocab_size))
        chosen = -all_reduce_max(offered, axis)
    return chosen
