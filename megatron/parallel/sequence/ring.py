"""Ring attention: keys and values travel from rank to rank, and every rank attends to them as they come by.

The next block travels while the present one is computed, in backward too, where the gradients of keys and values follow
their block around the ring and end where it came from.

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
    """What a rank computes of the attention of a micro-batch; layers with the same bounds share it.

    Shapes: places `[b or 1, ranks, n]` int64, slopes `[1, a, 1, 1]` float32.

    Attributes:
        tiles: for the keys of each rank of the ring.
        places: the place in its sample of each token of each rank; None if no score depends on distances.
        slopes: what a score loses per position of distance; None for nothing.
    """

    ring: Axis
    attention: PartialAttention
    seen: Visibility
    tiles: Sequence[Sequence[Tile]] = field(repr=False)
    places: torch.Tensor | None = field(repr=False)
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
        """The plan of a micro-batch; with documents the host waits for a GPU.

        Shapes: segment_ids `[b, s]`, or None if documents are not separated.

        Args:
            length: s.
        """
        documents = None if segment_ids is None else segment_ids.cpu().numpy()
        parts = split.parts(length, documents)
        steepness = torch.tensor(slopes, device=device).view(1, -1, 1, 1) if slopes else None
        tiles = tiles_of(parts, documents, split.ring.rank, seen)
        places = torch.from_numpy(parts).to(device) if seen.sloped or seen.window is not None else None
        return cls(split.ring, attention, seen, tiles, places, steepness)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that this rank computes."""
        return sum(tile.pairs for tiles in self.tiles for tile in tiles)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of this rank's queries to the keys of all ranks, and to the heads' sinks if there are any.

        Shapes: query `[b, a, n, d]`, key and value `[b, g, n, d]`, sinks `[a]`; result as query.
        """
        return _Ring.apply(query, key, value, sinks, self)  # type: ignore[no-any-return]

    def bias(self, tile: Tile, source: int) -> torch.Tensor | None:
        """What is added to the scores of a tile. Shapes: `[1, 1 or a, q, k]` float32."""
        if not tile.biased or self.places is None:
            return None
        of_row = self.places[0 if len(self.places) == 1 or tile.row is None else tile.row]
        distance = of_row[self.ring.rank, tile.queries].unsqueeze(1) - of_row[source, tile.keys]  # [q, k]
        if self.seen.bidirectional:
            distance = distance.abs()
        hidden = distance < 0
        if self.seen.window is not None:
            hidden |= distance >= self.seen.window
        bias = torch.zeros((1, 1, *distance.shape), device=distance.device)
        if self.slopes is not None:
            bias = -self.slopes * distance
        return bias.masked_fill(hidden, -torch.inf)

    def send_on(self, sent: torch.Tensor) -> _Message:
        """Begins to send a block to the next rank and to receive that of the one before."""
        ring, received = self.ring, torch.empty_like(sent)
        after, before = ring.ranks[(ring.rank + 1) % ring.size], ring.ranks[ring.rank - 1]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, after, ring.group), dist.P2POp(dist.irecv, received, before, ring.group)]
        )
        return _Message(ring, works, sent, received)


@dataclass(frozen=True)
class _Message:
    """A block on its way; what is sent is kept until it is gone."""

    ring: Axis
    works: Sequence[dist.Work]
    sent: torch.Tensor
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        """The block that was received."""
        wait_for(self.works, self.ring)
        return self.received


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, plan):  # type: ignore[no-untyped-def]
        # Copies are kept, of which the block is sent as it is in backward too: the arguments are often parts of a
        # joint projection, all of whose memory they would keep.
        query, kept = query.contiguous(), torch.stack((key, value))  # [2, b, g, n, d]
        ring, block = plan.ring, kept
        seen = query.new_full(query.shape[1:2], -torch.inf) if sinks is None else sinks
        out, logsumexp = only_sinks(query, seen)
        for step in range(ring.size):
            source = (ring.rank - step) % ring.size
            message = plan.send_on(block) if step + 1 < ring.size else None
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
        of_queries = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        returning: list[_Message] = []  # at most one
        for step in range(ring.size):
            source = (ring.rank - step) % ring.size
            message = plan.send_on(block) if step + 1 < ring.size else None
            tiles, of_block = plan.tiles[source], None
            if not returning or len(tiles) > 1:  # what one tile gives is added to what arrives
                of_block = torch.zeros(block.shape, dtype=torch.float32, device=block.device)
            for tile in tiles:
                rows = _rows(tile)
                own = (part[rows, :, tile.queries] for part in (out, logsumexp))
                parts = plan.attention.backward(
                    gradient[rows, :, tile.queries],
                    query[rows, :, tile.queries],
                    *block[:, rows, :, tile.keys],
                    *own,
                    causal=tile.causal,
                    bias=plan.bias(tile, source),
                )
                if of_block is None:
                    of_block = returning.pop().wait()
                of_queries[rows, :, tile.queries] += parts[0]
                of_block[0, rows, :, tile.keys] += parts[1]
                of_block[1, rows, :, tile.keys] += parts[2]
                del parts
            if returning:
                arrived = returning.pop().wait()
                of_block = arrived if of_block is None else of_block.add_(arrived)
                del arrived
            returning.append(plan.send_on(of_block))
            if message is not None:
                block = message.wait()
        of_key, of_value = returning.pop().wait().to(query.dtype)
        of_sinks = None if sinks is None else sink_gradient(gradient, out, logsumexp, sinks)
        return of_queries.to(query.dtype), of_key, of_value, of_sinks, None


def _rows(tile: Tile) -> slice:
    return slice(None) if tile.row is None else slice(tile.row, tile.row + 1)
