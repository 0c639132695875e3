"""What accompanies the hidden states through the layers: whose tokens they are, where they stand, what they may see.

A `StepContext` is made once per micro-batch and stage and never changes. It becomes tensors only between pipeline
stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import torch

from megatron.model.interface.auxiliary import AuxiliaryLosses
from megatron.model.interface.key_value_cache import KeyValueCache


class Recompute(Enum):
    """What runs again during backward instead of keeping its activations."""

    NONE = "none"
    ATTENTION = "attention"
    BLOCKS = "blocks"


class MaskKind(Enum):
    """What a token may attend to: all earlier tokens, or those of its own document."""

    CAUSAL = "causal"
    DOCUMENTS = "documents"


@dataclass(frozen=True)
class StepContext:
    """One micro-batch as the layers see it.

    Shapes: sample_ids `[b]` int64; segment_ids and position_ids `[b, s]` int64; attention_bias `[b, 1, s, s]`.

    Attributes:
        sample_ids: number of each sample in the order of the whole run; with the seed it decides dropout.
        known_first_sample: the first of them where the host knows it; `first_sample` reads it otherwise.
        seed: of dropout.
        position_offset: position of the first token in its sequence (behind a cache, or in a later part of the
            sequence).
        position_ids: positions where they are not consecutive from `position_offset`; None if they are.
        segment_ids: the document of each token; None where documents are not told apart.
        mask: what a token may attend to.
        attention_bias: 0 where a query sees a key and -inf elsewhere; None where the mask is plain causality.
        recompute: what runs again during backward.
        caches: keys and values of earlier tokens, one per block; None outside generation.
        auxiliary: takes the losses that layers add.
    """

    sample_ids: torch.Tensor
    known_first_sample: int | None = None
    seed: int = 0
    position_offset: int = 0
    position_ids: torch.Tensor | None = None
    segment_ids: torch.Tensor | None = None
    mask: MaskKind = MaskKind.CAUSAL
    attention_bias: torch.Tensor | None = None
    recompute: Recompute = Recompute.NONE
    caches: Sequence[KeyValueCache] | None = None
    auxiliary: AuxiliaryLosses = field(default_factory=AuxiliaryLosses)

    @cached_property
    def first_sample(self) -> int:
        """The first sample id; on a GPU the host waits for it, once, where it was not known."""
        return int(self.sample_ids[0]) if self.known_first_sample is None else self.known_first_sample

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the next pipeline stage needs to make the same context: `StepSettings.context` takes it."""
        return (self.sample_ids,) if self.segment_ids is None else (self.sample_ids, self.segment_ids)


@dataclass(frozen=True)
class StepSettings:
    """What the contexts of a run have in common.

    Args:
        seed: of dropout.
        recompute: what runs again during backward.
        restart_positions: number positions from 0 in every document (`--reset-position-ids`).
        mask: what a token may attend to (`--reset-attention-mask`).
        dtype: of activations.
    """

    seed: int = 0
    recompute: Recompute = Recompute.NONE
    restart_positions: bool = False
    mask: MaskKind = MaskKind.CAUSAL
    dtype: torch.dtype = torch.float32

    @property
    def needs_segments(self) -> bool:
        """Whether contexts tell documents apart."""
        return self.restart_positions or self.mask is MaskKind.DOCUMENTS

    @property
    def tensor_count(self) -> int:
        """How many tensors a pipeline stage is given to make a context from: `StepContext.tensors`."""
        return 2 if self.needs_segments else 1

    def context(
        self,
        sample_ids: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
        *,
        first_sample: int | None = None,
        caches: Sequence[KeyValueCache] | None = None,
        backward_scale: float = 1.0,
    ) -> StepContext:
        """The context of one micro-batch.

        Shapes: sample_ids `[b]`, segment_ids `[b, s]`, both int64.

        Args:
            first_sample: the first sample id where the host knows it.
            caches: one per block; the micro-batch's tokens follow those already in them.
            backward_scale: see `AuxiliaryLosses`.
        """
        separate = self.mask is MaskKind.DOCUMENTS and segment_ids is not None
        return StepContext(
            sample_ids=sample_ids,
            known_first_sample=first_sample,
            seed=self.seed,
            position_offset=caches[0].length if caches else 0,
            position_ids=restarted_positions(segment_ids)
            if self.restart_positions and segment_ids is not None
            else None,
            segment_ids=segment_ids,
            mask=MaskKind.DOCUMENTS if separate else MaskKind.CAUSAL,
            attention_bias=document_bias(segment_ids, self.dtype) if separate and segment_ids is not None else None,
            recompute=self.recompute,
            caches=caches,
            auxiliary=AuxiliaryLosses(backward_scale),
        )


def restarted_positions(segment_ids: torch.Tensor) -> torch.Tensor:
    """Positions that begin at 0 where a new segment does.

    Shapes: `[b, s]` to `[b, s]` int64.
    """
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    begins = torch.zeros_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def document_bias(segment_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to attention scores so that a query sees keys that are not later and in the same document.

    Shapes: `[b, s]` to `[b, 1, s, s]`, 0 or -inf.
    """
    seen = (segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)).tril()  # [b, s, s]
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return bias.masked_fill_(seen.logical_not_(), float("-inf")).unsqueeze(1)
