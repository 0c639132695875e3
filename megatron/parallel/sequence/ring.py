"""Ring attention: keys and values are passed around the ring, and every rank attends to each block that arrives.

The next block is in transit while the current one is computed. In the backward pass the gradients of keys and values
follow their block around the ring, back to its rank.

Source: Liu et al., "Ring attention with blockwise transformers", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron.kernels.attention.partial import PartialAttention, merge_
from megatron.kernels.attention.sinks import only_sinks, sink_gradient
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import wait_for
from megatron.parallel.sequence.split import SequenceSplit
from megatron.parallel.sequence.tiles import Tile, Visibility, tiles_of


@dataclass(frozen=True)
class RingPlan:
    """A rank's share of the attention of a micro-batch; layers with the same bounds share a plan.

    Shapes: positions `[b or 1, ranks, n]` int64, slopes `[1, a, 1, 1]` float32.

    Attributes:
        tiles: for the keys of each rank of the ring.
        positions: the position in its sample of each token of each rank; None if no score depends on distances.
        slopes: ALiBi's slope of each head; None without ALiBi.
    """

    ring: Axis
    attention: PartialAttention
    seen: Visibility
    tiles: Sequence[Sequence[Tile]] = field(repr=False)
    positions: torch.Tensor | None = field(repr=False)
    slopes: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        split: SequenceSplit,
        length: int,
        segment_ids: torch.Tensor | None,
        attention: PartialAttention,
        seen: Visibility,
        slopes: Sequence[float],
        device: torch.device,
    ) -> RingPlan:
        """The plan of a micro-batch; if documents are separated, the host waits for the GPU.

        Shapes: segment_ids `[b, s]`, or None if documents are not separated.

        Args:
            length: s.
        """
        documents = None if segment_ids is None else segment_ids.cpu().numpy()
        parts = split.parts(length, documents)
        steepness = torch.tensor(slopes, device=device).view(1, -1, 1, 1) if slopes else None
        tiles = tiles_of(parts, documents, split.ring.rank, seen)
        positions = torch.from_numpy(parts).to(device) if seen.sloped or seen.window is not None else None
        return cls(split.ring, attention, seen, tiles, positions, steepness)

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that this rank computes."""
        return sum(tile.pairs for tiles in self.tiles for tile in tiles)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of this rank's queries to the keys of all ranks, and to the heads' sinks if given.

        Shapes: query `[b, a, n, d]`, key and value `[b, g, n, d]`, sinks `[a]`; result as query.
        """
        return _Ring.apply(query, key, value, sinks, self)  # type: ignore[no-any-return]

    def bias(self, tile: Tile, source: int) -> torch.Tensor | None:
        """The bias of a tile's scores. Shapes: `[1, 1 or a, q, k]` float32."""
        if not tile.biased or self.positions is None:
            return None
        positions = self.positions[0 if len(self.positions) == 1 or tile.row is None else tile.row]
        distance = positions[self.ring.rank, tile.queries].unsqueeze(1) - positions[source, tile.keys]  # [q, k]
        if self.seen.bidirectional:
            distance = distance.abs()
        hidden = distance < 0
        if self.seen.window is not None:
            hidden |= distance >= self.seen.window
        bias = torch.zeros((1, 1, *distance.shape), device=distance.device)
        if self.slopes is not None:
            bias = -self.slopes * distance
        return bias.masked_fill(hidden, -torch.inf)

    def rotate(self, sent: torch.Tensor) -> _Message:
        """Starts to send a block to the next rank and to receive the block of the previous one."""
        ring, received = self.ring, torch.empty_like(sent)
        after, before = ring.ranks[(ring.rank + 1) % ring.size], ring.ranks[ring.rank - 1]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, after, ring.group), dist.P2POp(dist.irecv, received, before, ring.group)]
        )
        return _Message(ring, works, sent, received)


@dataclass(frozen=True)
class _Message:
    """A block in transit; holds the sent block until it has left."""

    ring: Axis
    works: Sequence[dist.Work]
    sent: torch.Tensor
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        wait_for(self.works, self.ring)
        return self.received


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, plan):  # type: ignore[no-untyped-def]
        # Saves copies: the arguments are often views of a joint projection, and would keep all of its memory. The
        # copied block is sent as it is, in backward too.
        query, kept = query.contiguous(), torch.stack((key, value))  # [2, b, g, n, d]
        ring, block = plan.ring, kept
        seen = query.new_full(query.shape[1:2], -torch.inf) if sinks is None else sinks
        out, logsumexp = only_sinks(query, seen)
        for step in range(ring.size):
            source = (ring.rank - step) % ring.size
            message = plan.rotate(block) if step + 1 < ring.size else None
            for tile in plan.tiles[source]:
                rows = _rows(tile)
                part = plan.attention.forward(
                    query[rows, :, tile.queries],
                    *block[:, rows, :, tile.keys],
                    causal=tile.causal,
                    bias=plan.bias(tile, source),
                )
                merge_(out[rows, :, tile.queries], logsumexp[rows, :, tile.queries], *part)
            if message is not None:
                block = message.wait()
        result = out.to(query.dtype)
        ctx.plan = plan
        ctx.save_for_backward(query, kept, result, logsumexp, sinks)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        query, block, out, logsumexp, sinks = ctx.saved_tensors
        plan = ctx.plan
        ring = plan.ring
        query_gradient = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        returning: list[_Message] = []  # at most one
        for step in range(ring.size):
            source = (ring.rank - step) % ring.size
            message = plan.rotate(block) if step + 1 < ring.size else None
            tiles, block_gradient = plan.tiles[source], None
            if not returning or len(tiles) > 1:  # a single tile's gradient is added to the arriving one
                block_gradient = torch.zeros(block.shape, dtype=torch.float32, device=block.device)
            for tile in tiles:
                rows = _rows(tile)
                saved = (part[rows, :, tile.queries] for part in (out, logsumexp))
                parts = plan.attention.backward(
                    gradient[rows, :, tile.queries],
                    query[rows, :, tile.queries],
                    *block[:, rows, :, tile.keys],
                    *saved,
                    causal=tile.causal,
                    bias=plan.bias(tile, source),
                )
                if block_gradient is None:
                    block_gradient = returning.pop().wait()
                query_gradient[rows, :, tile.queries] += parts[0]
                block_gradient[0, rows, :, tile.keys] += parts[1]
                block_gradient[1, rows, :, tile.keys] += parts[2]
                del parts
            if returning:
                arrived = returning.pop().wait()
                block_gradient = arrived if block_gradient is None else block_gradient.add_(arrived)
                del arrived
            returning.append(plan.rotate(block_gradient))
            if message is not None:
                block = message.wait()
        key_gradient, value_gradient = returning.pop().wait().to(query.dtype)
        sinks_gradient = None if sinks is None else sink_gradient(gradient, out, logsumexp, sinks)
        return query_gradient.to(query.dtype), key_gradient, value_gradient, sinks_gradient, None


def _rows(tile: Tile) -> slice:
    return slice(None) if tile.row is None else slice(tile.row, tile.row + 1)
