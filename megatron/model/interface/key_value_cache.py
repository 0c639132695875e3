"""Key-value caches for generation: their interface for attention, and its two implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from megatron.errors import ConfigError

Layer = tuple[torch.Tensor, torch.Tensor]


class CachedText(NamedTuple):
    """The keys and values of a text for its new queries, which are at the last positions.

    Shapes: keys and values `[b, g/t, k, d]`; with latent attention the latents as one head of keys, and no values.

    Attributes:
        queries: number of this text's tokens along s.
        prefix: number of its first tokens that attend to each other in both directions.
    """

    queries: int
    keys: torch.Tensor
    values: torch.Tensor
    prefix: int = 0


class KeyValueCaches(Protocol):
    """The keys and values of earlier tokens in this rank's layers."""

    @property
    def length(self) -> int:
        """The position of the next token; 0 if the batch holds texts of different lengths and has `position_ids`."""
        ...

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Sequence[CachedText]:
        """Appends one layer's new tokens; returns the texts of the queries, in the order along s.

        Shapes: keys and values `[b, g/t, s, d]`.

        Args:
            layer: index of the block in the whole network.
        """
        ...


class BatchCaches:
    """The caches of a batch of texts of equal length.

    Shapes: keys and values of a layer `[b, g/t, capacity, d]`; their memory is allocated at the first append.

    Args:
        capacity: most tokens of a text.
        prefix: as in `TextCache`.
    """

    def __init__(self, capacity: int, prefix: int = 0) -> None:
        self.capacity = capacity
        self.prefix = prefix
        self._layers: dict[int, Layer] = {}
        self._lengths: dict[int, int] = {}

    @property
    def length(self) -> int:
        """Tokens of each text so far; valid between two steps."""
        return max(self._lengths.values(), default=0)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Sequence[CachedText]:
        """Appends one layer's new tokens to all texts.

        Raises:
            ConfigError: the caches are full.
        """
        first = self._lengths.get(layer, 0)
        stop = first + keys.shape[2]
        if stop > self.capacity:
            raise ConfigError(
                f"{stop} tokens do not fit into a key-value cache of {self.capacity}. Generate fewer tokens or shorten "
                f"the prompt (--out-seq-length, --max-position-embeddings)."
            )
        if layer not in self._layers:
            self._layers[layer] = _allocated(keys, self.capacity), _allocated(values, self.capacity)
        all_keys, all_values = self._layers[layer]
        all_keys[:, :, first:stop] = keys
        all_values[:, :, first:stop] = values
        self._lengths[layer] = stop
        return (CachedText(keys.shape[2], all_keys[:, :, :stop], all_values[:, :, :stop], self.prefix),)

    def truncate(self, length: int) -> None:
        """Keeps only the first `length` tokens."""
        self._lengths = {layer: min(length, before) for layer, before in self._lengths.items()}

    def select(self, rows: torch.Tensor) -> None:
        """Selects or reorders texts of the batch.

        Shapes: rows `[new b]` int64.
        """
        self._layers = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self._layers.items()}


@dataclass
class TextCache:
    """The caches of one text, in memory that grows by blocks: less than one block is unused.

    The blocks of a layer are contiguous, so that attention reads them in place; growing copies them, which at usual
    lengths costs little compared with reading them for every token.

    Shapes: keys and values of a layer `[1, g/t, capacity, d]`.

    Args:
        block_tokens: tokens of a block.
        prefix: number of first tokens that attend to each other in both directions; they must come in one step.
    """

    block_tokens: int
    length: int = 0
    prefix: int = 0
    _layers: dict[int, Layer] = field(default_factory=dict)

    @property
    def allocated_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for layer in self._layers.values() for part in layer)

    def extended(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> CachedText:
        """Writes one layer's new tokens after the first `length`, which `advance` changes once all layers have written.

        Shapes: keys and values `[1, g/t, s, d]`.
        """
        first, count = self.length, keys.shape[2]
        stop = first + count
        held = self._layers.get(layer)
        if held is None or held[0].shape[2] < stop:
            capacity = -(-stop // self.block_tokens) * self.block_tokens
            before_keys, before_values = held or (None, None)
            held = _grown(keys, before_keys, capacity, first), _grown(values, before_values, capacity, first)
            self._layers[layer] = held
        all_keys, all_values = held
        all_keys.narrow(2, first, count).copy_(keys)
        all_values.narrow(2, first, count).copy_(values)
        return CachedText(count, all_keys.narrow(2, 0, stop), all_values.narrow(2, 0, stop), self.prefix)

    def clear(self) -> None:
        """Removes all tokens and frees their memory."""
        self.length = 0
        self._layers.clear()


@dataclass(frozen=True)
class MixedCaches:
    """The caches of texts of different lengths, whose new tokens are concatenated along s in a batch of 1.

    Nothing is padded, and each text is attended to separately: its results do not depend on the others.

    Attributes:
        texts: the texts in order.
        counts: number of new tokens of each.
    """

    texts: Sequence[TextCache]
    counts: Sequence[int]

    @property
    def length(self) -> int:
        """0: the context has `position_ids`."""
        return 0

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Sequence[CachedText]:
        """Appends one layer's new tokens to their texts."""
        if len(self.texts) == 1:
            return (self.texts[0].extended(layer, keys, values),)
        parts = zip(self.texts, keys.split(list(self.counts), 2), values.split(list(self.counts), 2), strict=True)
        return [text.extended(layer, new_keys, new_values) for text, new_keys, new_values in parts]

    def advance(self) -> None:
        """Counts the new tokens, once all layers have appended theirs."""
        for text, count in zip(self.texts, self.counts, strict=True):
            text.length += count


def _allocated(like: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, size = like.shape
    return like.new_empty(batch, heads, capacity, size)


def _grown(like: torch.Tensor, held: torch.Tensor | None, capacity: int, length: int) -> torch.Tensor:
    """Memory for `capacity` tokens, with the first `length` copied from `held`."""
    grown = _allocated(like, capacity)
    if held is not None and length:
        grown.narrow(2, 0, length).copy_(held.narrow(2, 0, length))
    return grown
