"""Attention of documents and sliding windows that computes only visible blocks, with torch's ordinary attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.kernels.attention.bounds import Bounds, cumulative_lengths, local_bias
from megatron.kernels.attention.dense import attention

SMALLEST_BLOCK = 64  # tokens; with smaller blocks the calls cost more than their computation


@dataclass(frozen=True)
class DocumentBlocks:
    """Attention with one call per document.

    Attributes:
        lengths: lengths of the documents of all samples, in tokens; no document spans two samples.
        within: window and slopes within a document.
        biases: bias of each document, `[1, 1 or a, n, n]`, if any document has a prefix; otherwise empty.
    """

    lengths: list[int]
    within: WindowBlocks
    biases: Sequence[torch.Tensor] = ()

    @classmethod
    def plan(
        cls, bounds: Bounds, segment_ids: torch.Tensor, query: torch.Tensor, softcap: float | None
    ) -> DocumentBlocks:
        """The plan of a micro-batch.

        Shapes: segment_ids `[b, s]`, query `[b, a, s, d]`.
        """
        lengths: list[int] = cumulative_lengths(segment_ids).diff().tolist()
        within = WindowBlocks.plan(bounds, softcap)
        if bounds.prefix_mask is None or bounds.bidirectional:
            return cls(lengths, within)
        tokens = query.transpose(1, 2).flatten(0, 1).split(lengths)
        biases = [
            local_bias(part.transpose(0, 1).unsqueeze(0), len(part), bounds.window, bounds.slopes, prefix.unsqueeze(0))
            for part, prefix in zip(tokens, bounds.prefix_mask.flatten().split(lengths), strict=True)
        ]
        return cls(lengths, within, biases)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Applies attention.

        Shapes: query `[b, a, s, d]`, key and value `[b, g, s, d]`; result as query.
        """
        batch, heads, length, size = query.shape
        # A single split over the tokens of all samples makes backward a single concatenation.
        tokens = [part.transpose(1, 2).flatten(0, 1).split(self.lengths) for part in (query, key, value)]  # [n, a, d]
        parts = []
        for number, document in enumerate(zip(*tokens, strict=True)):
            queries, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in document)  # [1, a, n, d]
            if self.biases:
                bias, softcap = self.biases[number], self.within.softcap
                attended = attention(queries, keys, values, scale, bias=bias, softcap=softcap)
            else:
                attended = self.within.attend(queries, keys, values, scale)
            parts.append(attended.squeeze(0).transpose(0, 1))  # [n, a, d]
        return torch.cat(parts).view(batch, length, heads, size).transpose(1, 2)


@dataclass(frozen=True)
class WindowBlocks:
    """Attention in a sliding window: each block of queries attends to its own block of keys and the one before.

    Sequences shorter than two windows have one block, as have all sequences with bidirectional attention, whose windows
    extend to both sides.
    """

    window: int | None = None
    slopes: tuple[float, ...] = ()
    softcap: float | None = None
    bidirectional: bool = False

    @classmethod
    def plan(cls, bounds: Bounds, softcap: float | None) -> WindowBlocks:
        """The plan of a micro-batch without documents."""
        return cls(bounds.window, bounds.slopes, softcap, bounds.bidirectional)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Applies attention.

        Shapes: query `[b, a, s, d]`, key and value `[b, g, s, d]`; result as query.
        """
        length = query.shape[2]
        window = self.window if self.window is not None and self.window < length else None
        block = length if window is None else max(window, SMALLEST_BLOCK)
        if 2 * block > length or self.bidirectional:
            if window is None and not self.slopes:
                return attention(query, key, value, scale, causal=not self.bidirectional, softcap=self.softcap)
            return self._attend(query, key, value, scale)
        if -length % block:
            query, key, value = (F.pad(part, (0, 0, 0, -length % block)) for part in (query, key, value))
        queries, keys, values = (part.split(block, dim=2) for part in (query, key, value))
        count = len(queries) - 1
        first = self._attend(queries[0], keys[0], values[0], scale)
        pairs, contents = (
            torch.cat([torch.cat(part[index : index + 2], dim=2) for index in range(count)]) for part in (keys, values)
        )  # [(blocks - 1)*b, g, 2*block, d]
        rest = self._attend(torch.cat(queries[1:]), pairs, contents, scale)
        return torch.cat((first, *rest.chunk(count)), dim=2)[:, :, :length]

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of queries at the last positions of the keys."""
        bias = local_bias(query, key.shape[2], self.window, self.slopes, bidirectional=self.bidirectional)
        return attention(query, key, value, scale, bias=bias, softcap=self.softcap)
