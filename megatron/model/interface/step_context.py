"""What layers need besides the hidden states: sample ids, positions, attention mask, caches and recomputation.

A `StepContext` is built once per micro-batch and stage and is immutable. It is converted to tensors only between
pipeline stages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from megatron.model.interface.auxiliary import AuxiliaryLosses
from megatron.model.interface.key_value_cache import KeyValueCaches
from megatron.parallel.mesh import Axis
from megatron.parallel.sequence.split import SequenceSplit

Shared = TypeVar("Shared")

_ALONE = Axis.single("tp")

# The fields of a context that only some networks have, in the order in which they pass from stage to stage.
OPTIONAL_TENSORS = ("segment_ids", "prefix_mask", "token_types", "predicted", "tokens")

# Those that attention reads whole where ranks share the samples.
WHOLE_TENSORS = ("segment_ids", "prefix_mask")


class Recompute(Enum):
    """What is recomputed during backward instead of keeping its activations.

    `SPLIT_BLOCKS` splits the inputs of the blocks, which are kept, over the tensor-parallel ranks.
    """

    NONE = "none"
    ATTENTION = "attention"
    BLOCKS = "blocks"
    SPLIT_BLOCKS = "split blocks"


class MaskKind(Enum):
    """What a token may attend to: all earlier tokens, or the earlier tokens of its own document.

    Later ones are hidden by the layers of networks that are not bidirectional.
    """

    CAUSAL = "causal"
    DOCUMENTS = "documents"


@dataclass(frozen=True)
class TextPart:
    """Consecutive tokens of one text.

    Attributes:
        count: number of tokens.
        first: position of the first one in its text.
        text_length: the length that rotary frequencies go by where they depend on it: all tokens that are known.
    """

    count: int
    first: int
    text_length: int


@dataclass(frozen=True)
class StepContext:
    """What the layers know about a micro-batch.

    Where ranks share its samples, s is what this rank computes on; segment_ids and prefix_mask are of the whole
    samples, since attention reads them.

    Shapes: sample_ids `[b]` int64; segment_ids, position_ids, token_types and tokens `[b, s]` int64; prefix_mask
    `[b, s]` bool; predicted `[b, m]` int64.

    Attributes:
        sample_ids: index of each sample in the sample order of the run; together with the seed it determines dropout.
        known_first_sample: the first sample id if the host knows it; `first_sample` reads it otherwise.
        seed: seed of dropout.
        position_offset: position of the first token in its sequence (after cached tokens, or in a later part of the
            sequence).
        position_ids: the positions; None if they are consecutive from `position_offset`.
        segment_ids: document number of each token; None if documents are not separated.
        mask: what a token may attend to.
        prefix_mask: tokens that all tokens of their document may attend to, earlier ones included; None if a token is
            only seen by later ones.
        token_types: which of the segments of its sample each token belongs to; None in networks without token types.
        predicted: the positions for which a masked language model computes outputs; None for all.
        tokens: the tokens of the samples, for layers beyond the first that look tokens up; None if there are none.
        recompute: what is recomputed during backward.
        explicit_attention: whether attention keeps its probabilities where one fused call would do.
        factored_logits: whether the head returns the factors of the logits instead of their product.
        holds_parameters: whether parameters are there between the calls of their modules; with ZeRO-3 they are not.
        sequence_parallel: the ranks over which the tokens of hidden states are split between matrix products; all other
            tensors of the context are of whole sequences.
        caches: keys and values of earlier tokens; None outside generation.
        drops_tokens: whether experts with a capacity drop tokens, so that a sample depends on those beside it.
        split: how ranks share the samples; None if this rank computes on all of their tokens.
        texts: the texts whose new tokens follow each other along s, in a batch of 1 with `position_ids`; empty if every
            row is one text.
        auxiliary: collects the losses that layers add.
        shared: tensors that several layers use, such as masks and rotation angles; see `once`.
        kept: tensors that all micro-batches of the same settings use; see `once_for_all`.
        splits_sequence: whether hidden states between matrix products are of a part of the tokens along s:
            `[b, s/t, h]`.
        bounds_attention: whether tokens do not simply attend to all earlier ones, or in both directions to all.
    """

    sample_ids: torch.Tensor
    known_first_sample: int | None = None
    seed: int = 0
    position_offset: int = 0
    position_ids: torch.Tensor | None = None
    segment_ids: torch.Tensor | None = None
    mask: MaskKind = MaskKind.CAUSAL
    prefix_mask: torch.Tensor | None = None
    token_types: torch.Tensor | None = None
    predicted: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    recompute: Recompute = Recompute.NONE
    explicit_attention: bool = False
    factored_logits: bool = False
    holds_parameters: bool = False
    sequence_parallel: Axis = _ALONE
    caches: KeyValueCaches | None = None
    drops_tokens: bool = True
    split: SequenceSplit | None = None
    texts: tuple[TextPart, ...] = ()
    auxiliary: AuxiliaryLosses = field(default_factory=AuxiliaryLosses)
    shared: dict[Hashable, Any] = field(default_factory=dict)
    kept: dict[Hashable, Any] = field(default_factory=dict)
    splits_sequence: bool = field(init=False)
    bounds_attention: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "splits_sequence", self.sequence_parallel.size > 1)
        bounds = self.mask is MaskKind.DOCUMENTS or self.prefix_mask is not None
        object.__setattr__(self, "bounds_attention", bounds)

    @cached_property
    def first_sample(self) -> int:
        """The first sample id; on a GPU the host waits for it, once, where it was not known."""
        return int(self.sample_ids[0]) if self.known_first_sample is None else self.known_first_sample

    def once(self, key: Hashable, compute: Callable[[], Shared]) -> Shared:
        """The value that `compute` returned for `key` in the first layer that asked for it."""
        if key not in self.shared:
            self.shared[key] = compute()
        return self.shared[key]  # type: ignore[no-any-return]

    def once_for_all(self, key: Hashable, compute: Callable[[], Shared]) -> Shared:
        """The value that `compute` returned for `key` in the first micro-batch of the same settings that asked for it.

        A constant of the host belongs here: a copy to a GPU makes the host wait, and cannot be part of a CUDA graph.
        """
        if key not in self.kept:
            self.kept[key] = compute()
        return self.kept[key]  # type: ignore[no-any-return]

    def positions(self, length: int) -> torch.Tensor | None:
        """The place in its sample of each of the `length` tokens along s; None if they are consecutive from
        `position_offset`.

        Shapes: `[s]` or `[b, s]` int64.
        """
        split = self.split
        if split is None:
            return None

        def compute() -> torch.Tensor:
            places = split.positions(length * split.size, _on_host(self.segment_ids))
            device = self.sample_ids.device
            return torch.from_numpy(places).to(device) if len(places) > 1 else _ranges(places[0], device)

        return self.once(("positions", length), compute)

    def by_sample(self, states: torch.Tensor) -> torch.Tensor:
        """States of tokens, sample after sample, that are a matrix or are divided by samples already, so divided.

        Shapes: `[b * s, h]` or `[b, s, h]` to `[b, s, h]`.
        """
        return states if states.dim() == 3 else states.view(self.sample_ids.shape[0], -1, states.shape[-1])

    def own_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Of values for the tokens along s those for hidden states. Shapes: `[..., s]` to `[..., s/t]`."""
        axis = self.sequence_parallel
        return values if axis.size == 1 else values.chunk(axis.size, dim=-1)[axis.rank]

    def first_position(self, length: int) -> int:
        """The position of the first of `length` tokens of hidden states, if those are consecutive."""
        return self.position_offset + self.sequence_parallel.rank * length

    def hidden_positions(self, length: int) -> torch.Tensor | None:
        """As `positions`, of `length` tokens of hidden states. Shapes: `[s/t]` or `[b, s/t]` int64."""
        positions = self.positions(length * self.sequence_parallel.size)
        return None if positions is None else self.own_tokens(positions)

    def positions_needed(self, length: int) -> int:
        """One more than the last position of the samples, of which this micro-batch has `length` tokens along s."""
        if self.texts:
            return max(part.first + part.count for part in self.texts)
        return self.position_offset + length * (1 if self.split is None else self.split.size)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors from which the next pipeline stage rebuilds this context with `StepSettings.context`."""
        optional = (getattr(self, name) for name in OPTIONAL_TENSORS)
        return (self.sample_ids, *(tensor for tensor in optional if tensor is not None))


@dataclass(frozen=True)
class StepSettings:
    """The settings shared by all contexts of a run.

    Args:
        seed: seed of dropout.
        recompute: what is recomputed during backward.
        restart_positions: whether positions restart at 0 in every document (`--reset-position-ids`).
        mask: what a token may attend to (`--reset-attention-mask`).
        has_prefixes: whether every micro-batch has a prefix mask.
        has_token_types: whether every micro-batch has token types.
        has_predicted: whether every micro-batch names the positions to predict.
        has_tokens: whether contexts have the tokens.
        dtype: dtype of activations.
        hidden_size: width of the hidden states.
        explicit_attention: whether attention keeps its probabilities (`--no-fused-attention`).
        factored_logits: whether the head returns `FactoredLogits`, for objectives that never hold the logits.
        holds_parameters: see `StepContext`.
        drops_tokens: see `StepContext`.
        split: how ranks share the samples; None if each rank computes on whole ones.
        sequence_parallel: the ranks over which the tokens of hidden states are split; see `StepContext`.
        kept: what their contexts share; see `StepContext.once_for_all`.
    """

    seed: int = 0
    recompute: Recompute = Recompute.NONE
    restart_positions: bool = False
    mask: MaskKind = MaskKind.CAUSAL
    has_prefixes: bool = False
    has_token_types: bool = False
    has_predicted: bool = False
    has_tokens: bool = False
    dtype: torch.dtype = torch.float32
    hidden_size: int = 0
    explicit_attention: bool = False
    factored_logits: bool = False
    holds_parameters: bool = False
    drops_tokens: bool = True
    split: SequenceSplit | None = None
    sequence_parallel: Axis = _ALONE
    kept: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def hidden_shape(self, samples: int, tokens: int) -> tuple[int, int, int]:
        """The shape of hidden states between blocks, on one rank.

        Raises:
            ValueError: nobody has said how wide they are.
        """
        if not self.hidden_size:
            raise ValueError("a pipeline needs StepSettings.hidden_size, the width of what its ranks send each other")
        return samples, tokens // self.sequence_parallel.size, self.hidden_size

    @property
    def needs_segments(self) -> bool:
        return self.restart_positions or self.mask is MaskKind.DOCUMENTS

    @property
    def tensor_count(self) -> int:
        return 1 + len(self.passed)

    @property
    def passed(self) -> tuple[str, ...]:
        """The optional tensors of every micro-batch by name, in the order of `StepContext.tensors`."""
        present = (
            self.needs_segments,
            self.has_prefixes,
            self.has_token_types,
            self.has_predicted,
            self.has_tokens,
        )
        return tuple(name for name, is_present in zip(OPTIONAL_TENSORS, present, strict=True) if is_present)

    def context(
        self,
        sample_ids: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
        prefix_mask: torch.Tensor | None = None,
        *,
        token_types: torch.Tensor | None = None,
        predicted: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        first_sample: int | None = None,
        caches: KeyValueCaches | None = None,
        backward_scale: float | torch.Tensor = 1.0,
    ) -> StepContext:
        """Builds the context of one micro-batch.

        Shapes: as in `StepContext`.

        Args:
            first_sample: the first sample id, if the host knows it; reading it from a GPU would synchronize.
            caches: the micro-batch's tokens follow those already in them.
            backward_scale: see `AuxiliaryLosses`.
        """
        separate = self.mask is MaskKind.DOCUMENTS and segment_ids is not None
        position_ids = None
        if self.restart_positions and segment_ids is not None:
            position_ids = restarted_positions(segment_ids)
            if self.split is not None:
                places = self.split.positions(segment_ids.shape[1], _on_host(segment_ids))
                position_ids = position_ids.gather(
                    1, torch.from_numpy(places).to(segment_ids).expand(len(segment_ids), -1)
                )
        return StepContext(
            sample_ids=sample_ids,
            known_first_sample=first_sample,
            seed=self.seed,
            position_offset=0 if caches is None else caches.length,
            position_ids=position_ids,
            segment_ids=segment_ids,
            mask=MaskKind.DOCUMENTS if separate else MaskKind.CAUSAL,
            prefix_mask=prefix_mask,
            token_types=token_types,
            predicted=predicted,
            tokens=tokens,
            recompute=self.recompute,
            explicit_attention=self.explicit_attention,
            factored_logits=self.factored_logits,
            holds_parameters=self.holds_parameters,
            sequence_parallel=self.sequence_parallel,
            caches=caches,
            drops_tokens=self.drops_tokens,
            split=self.split,
            auxiliary=AuxiliaryLosses(backward_scale),
            kept=self.kept,
        )

    def context_of(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        first_sample: int | None = None,
        backward_scale: float | torch.Tensor = 1.0,
    ) -> StepContext:
        """Builds the context of a micro-batch from its `StepContext.tensors`."""
        sample_ids, *optional = tensors
        named = dict(zip(self.passed, optional, strict=True))
        return self.context(sample_ids, **named, first_sample=first_sample, backward_scale=backward_scale)  # type: ignore[arg-type]


def restarted_positions(segment_ids: torch.Tensor) -> torch.Tensor:
    """Positions that restart at 0 with each segment.

    Shapes: `[b, s]` to `[b, s]` int64.
    """
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    begins = torch.zeros_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return index - index.masked_fill(~begins, 0).cummax(dim=1).values


def _ranges(places: np.ndarray, device: torch.device) -> torch.Tensor:
    """Places that lie in a few ranges, as a tensor that is computed where it is used: a copy would have the host wait.

    Shapes: places `[n]`; result `[n]` int64.
    """
    ranges = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    made = [torch.arange(int(each[0]), int(each[-1]) + 1, device=device) for each in ranges]
    return made[0] if len(made) == 1 else torch.cat(made)


def _on_host(segment_ids: torch.Tensor | None) -> np.ndarray | None:
    """Segment ids as numpy reads them; the host waits for a GPU."""
    return None if segment_ids is None else segment_ids.cpu().numpy()
