"""The inputs of layers besides hidden states: sample ids, positions, attention mask, caches and recomputation.

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

# The optional tensors of a context, in the order of passing from stage to stage.
OPTIONAL_TENSORS = ("segment_ids", "prefix_mask", "token_types", "predicted", "tokens")

# The tensors of whole samples, even if ranks share the samples, since attention reads them.
WHOLE_TENSORS = ("segment_ids", "prefix_mask")


class Recompute(Enum):
    """The modules that are recomputed during backward instead of keeping their activations.

    `SPLIT_BLOCKS` splits the kept inputs of the blocks over the tensor-parallel ranks.
    """

    NONE = "none"
    ATTENTION = "attention"
    BLOCKS = "blocks"
    SPLIT_BLOCKS = "split blocks"


class MaskKind(Enum):
    """The tokens that a token may attend to: all earlier ones, or the earlier ones of its document.

    In bidirectional networks, the later ones as well.
    """

    CAUSAL = "causal"
    DOCUMENTS = "documents"


@dataclass(frozen=True)
class TextPart:
    """Consecutive tokens of one text.

    Attributes:
        count: number of tokens.
        first: position of the first token in its text.
        text_length: tokens of the text known so far, pending ones included, for rotary frequencies that depend on it.
    """

    count: int
    first: int
    text_length: int


@dataclass(frozen=True)
class StepContext:
    """The context of a micro-batch for the layers.

    If ranks share its samples, s counts this rank's tokens; segment_ids and prefix_mask cover the whole samples, since
    attention reads them.

    Shapes: sample_ids `[b]` int64; segment_ids, position_ids, token_types and tokens `[b, s]` int64; prefix_mask
    `[b, s]` bool; predicted `[b, m]` int64.

    Attributes:
        sample_ids: index of each sample in the sample order of the run; together with the seed it determines dropout.
        known_first_sample: the first sample id, if the host has it; otherwise `first_sample` reads it from the device.
        seed: seed of dropout.
        position_offset: position of the first token in its sequence (after cached tokens, or in a later part of the
            sequence).
        position_ids: the positions; None if they are consecutive from `position_offset`.
        segment_ids: document number of each token; None if documents are not separated.
        mask: the tokens that a token may attend to.
        prefix_mask: tokens that all tokens of their document may attend to, earlier ones included; None for none.
        token_types: index of each token's segment in its sample; None in networks without token types.
        predicted: the output positions of a masked language model; None for all.
        tokens: the tokens of the samples, if layers beyond the first look them up; otherwise None.
        recompute: the modules that are recomputed during backward.
        explicit_attention: True if attention keeps its probabilities instead of using a fused kernel.
        factored_logits: True if the head returns the factors of the logits instead of their product.
        holds_parameters: True if parameters persist between the calls of their modules; with ZeRO-3 they do not.
        sequence_parallel: the axis over which the tokens of hidden states are split between matrix products; all other
            tensors of the context cover whole sequences.
        caches: keys and values of earlier tokens; None outside generation.
        drops_tokens: True if experts with a capacity drop tokens, so that samples of a batch affect each other.
        split: the division of samples over ranks; None if this rank computes on all tokens.
        texts: the texts whose new tokens are concatenated along s, in a batch of 1 with `position_ids`; empty if every
            row is one text.
        auxiliary: collects the losses of layers.
        shared: tensors that several layers use, such as masks and rotation angles; see `once`.
        kept: tensors that all micro-batches of the same settings use; see `once_for_all`.
        splits_sequence: True if hidden states between matrix products are split along s: `[b, s/t, h]`.
        bounds_attention: True unless tokens attend to all earlier tokens, or in both directions to all.
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
        """The first sample id; unless known to the host, reading it synchronizes with a GPU once."""
        return int(self.sample_ids[0]) if self.known_first_sample is None else self.known_first_sample

    def once(self, key: Hashable, compute: Callable[[], Shared]) -> Shared:
        """The value for `key`, computed by the first layer that needs it."""
        if key not in self.shared:
            self.shared[key] = compute()
        return self.shared[key]  # type: ignore[no-any-return]

    def once_for_all(self, key: Hashable, compute: Callable[[], Shared]) -> Shared:
        """The value for `key`, computed in the first micro-batch of these settings that needs it.

        Constants of the host belong here: copying them to a GPU synchronizes, and cannot be part of a CUDA graph.
        """
        if key not in self.kept:
            self.kept[key] = compute()
        return self.kept[key]  # type: ignore[no-any-return]

    def positions(self, length: int) -> torch.Tensor | None:
        """The positions in their sample of the `length` tokens along s; None if consecutive from `position_offset`.

        Shapes: `[s]` or `[b, s]` int64.
        """
        split = self.split
        if split is None:
            return None

        def compute() -> torch.Tensor:
            positions = split.positions(length * split.size, _on_host(self.segment_ids))
            device = self.sample_ids.device
            return torch.from_numpy(positions).to(device) if len(positions) > 1 else _ranges(positions[0], device)

        return self.once(("positions", length), compute)

    def by_sample(self, states: torch.Tensor) -> torch.Tensor:
        """Restores the dimension of samples of states that may be a matrix with a row per token.

        Shapes: `[b * s, h]` or `[b, s, h]` to `[b, s, h]`.
        """
        return states if states.dim() == 3 else states.view(self.sample_ids.shape[0], -1, states.shape[-1])

    def local_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Selects the values of this rank's hidden states. Shapes: `[..., s]` to `[..., s/t]`."""
        axis = self.sequence_parallel
        return values if axis.size == 1 else values.chunk(axis.size, dim=-1)[axis.rank]

    def first_position(self, length: int) -> int:
        """The position of the first of `length` consecutive tokens of hidden states."""
        return self.position_offset + self.sequence_parallel.rank * length

    def hidden_positions(self, length: int) -> torch.Tensor | None:
        """As `positions`, for `length` tokens of hidden states. Shapes: `[s/t]` or `[b, s/t]` int64."""
        positions = self.positions(length * self.sequence_parallel.size)
        return None if positions is None else self.local_tokens(positions)

    def positions_needed(self, length: int) -> int:
        """The length of the samples, with `length` tokens along s in this micro-batch."""
        if self.texts:
            return max(part.first + part.count for part in self.texts)
        return self.position_offset + length * (1 if self.split is None else self.split.size)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the next pipeline stage rebuilds this context from, with `StepSettings.context`."""
        optional = (getattr(self, name) for name in OPTIONAL_TENSORS)
        return (self.sample_ids, *(tensor for tensor in optional if tensor is not None))


@dataclass(frozen=True)
class StepSettings:
    """The settings shared by all contexts of a run.

    Args:
        seed: seed of dropout.
        recompute: see `StepContext`.
        restart_positions: positions restart at 0 in every document (`--reset-position-ids`).
        mask: see `StepContext` (`--reset-attention-mask`).
        has_prefixes: every micro-batch has a prefix mask.
        has_token_types: every micro-batch has token types.
        has_predicted: every micro-batch has the positions to predict.
        has_tokens: contexts have the tokens.
        dtype: dtype of activations.
        hidden_size: width of the hidden states.
        explicit_attention: see `StepContext` (`--no-fused-attention`).
        factored_logits: the head returns `FactoredLogits`, for objectives that never hold the logits.
        holds_parameters, drops_tokens, split, sequence_parallel: see `StepContext`.
        kept: the tensors that all contexts share; see `StepContext.once_for_all`.
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
            ValueError: `hidden_size` is not set.
        """
        if not self.hidden_size:
            raise ValueError(
                "a pipeline requires StepSettings.hidden_size, the width of the hidden states that ranks exchange"
            )
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
            first_sample: the first sample id, if the host has it; reading it from a GPU would synchronize.
            caches: the caches that the micro-batch's tokens continue.
            backward_scale: see `AuxiliaryLosses`.
        """
        separate = self.mask is MaskKind.DOCUMENTS and segment_ids is not None
        position_ids = None
        if self.restart_positions and segment_ids is not None:
            position_ids = restarted_positions(segment_ids)
            if self.split is not None:
                local = torch.from_numpy(self.split.positions(segment_ids.shape[1], _on_host(segment_ids)))
                position_ids = position_ids.gather(1, local.to(segment_ids).expand(len(segment_ids), -1))
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
    starts = torch.zeros_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return index - index.masked_fill(~starts, 0).cummax(dim=1).values


def _ranges(positions: np.ndarray, device: torch.device) -> torch.Tensor:
    """Builds positions from their few ranges on the device: copying them from the host would synchronize.

    Shapes: positions `[n]`; result `[n]` int64.
    """
    ranges = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    tensors = [torch.arange(int(one[0]), int(one[-1]) + 1, device=device) for one in ranges]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _on_host(segment_ids: torch.Tensor | None) -> np.ndarray | None:
    """Segment ids as a numpy array; synchronizes with a GPU."""
    return None if segment_ids is None else segment_ids.cpu().numpy()
