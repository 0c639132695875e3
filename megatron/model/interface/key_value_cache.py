"""Key-value cache for generating token by token."""

from __future__ import annotations

import torch

from megatron.errors import ConfigError


class KeyValueCache:
    """The keys and values of all tokens that one layer has processed.

    Shapes: keys and values `[b, a/t, k, d]`; memory for `capacity` tokens is allocated at the first append.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the keys and values of new tokens and returns those of all tokens so far.

        Raises:
            ConfigError: the cache is full.
        """
        stop = self.length + keys.shape[2]
        if stop > self.capacity:
            raise ConfigError(
                f"{stop} tokens do not fit into a key-value cache of {self.capacity}. Generate fewer tokens or shorten "
                f"the "
                f"prompt (--out-seq-length, --max-position-embeddings)."
            )
        if self._keys is None or self._values is None:
            batch, heads, _, size = keys.shape
            self._keys = keys.new_empty(batch, heads, self.capacity, size)
            self._values = torch.empty_like(self._keys)
        self._keys[:, :, self.length : stop] = keys
        self._values[:, :, self.length : stop] = values
        self.length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    def truncate(self, length: int) -> None:
        """Drops all but the first `length` tokens."""
        self.length = min(self.length, length)

    def select(self, rows: torch.Tensor) -> None:
        """Selects or reorders sequences of the batch.

        Shapes: rows `[new b]` int64.
        """
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]
