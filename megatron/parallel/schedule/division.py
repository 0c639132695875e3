"""Divides the blocks of a network over the chunks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations

from megatron.config.rules.layout import stages_problems
from megatron.config.sections.parallel import ParallelRequest
from megatron.errors import ConfigError
from megatron.parallel.schedule.actions import Placement


@dataclass(frozen=True)
class Division:
    """The rule for dividing blocks over chunks.

    Attributes:
        by_cost: layers are weighted by their cost; otherwise all blocks have equal weight.
        first, last: weights of the layers before the first block and after the last one, in blocks, unless `by_cost`.
        first_blocks, last_blocks: requested number of blocks on the first and the last pipeline rank.
    """

    by_cost: bool = True
    first: int = 0
    last: int = 0
    first_blocks: int | None = None
    last_blocks: int | None = None

    @classmethod
    def of(cls, parallel: ParallelRequest) -> Division:
        """The division set by the flags: by cost, unless one of them counts blocks.

        Source: NVIDIA/Megatron-LM, megatron/core/transformer/transformer_block.py (`get_num_layers_to_build`);
        DeepSpeed, runtime/pipe/module.py (`type:REGEX` counts layers by name).
        """
        first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
        counting_flags = (parallel.pp_partition_method, parallel.num_layers_per_virtual_pipeline_stage, first, last)
        by_cost = not any(parallel.counted_ends) and all(value is None for value in counting_flags)
        return cls(by_cost, *parallel.counted_ends, first, last)

    def counts(self, blocks: Sequence[int], ends: tuple[int, int], placement: Placement) -> list[int]:
        """The number of consecutive blocks in each chunk, at least one.

        Minimizes the cost of the most expensive rank, then of the most expensive chunk. Exact for blocks of equal cost,
        and for the rank also with one chunk per rank; a heuristic otherwise. Ties are resolved in favor of equal
        numbers of blocks.

        Args:
            blocks: the cost of each block.
            ends: the costs of the layers before the first block and after the last one.

        Raises:
            ConfigError: there are fewer blocks than chunks.
        """
        for problem in stages_problems(len(blocks), placement.chunks):
            raise ConfigError(problem)
        even = self._evenly(len(blocks), placement)
        if not self.by_cost:
            return even
        costs = [blocks[0] + ends[0], *blocks[1:]]
        costs[-1] += ends[1]
        owners, balanced = placement.owners, _balanced(blocks, ends, placement.owners, _preferred(placement))
        if len(set(blocks)) > 1:
            starts = [balanced]
            if placement.chunks == placement.ranks:
                starts.append(_with_least_chunks(costs, placement.chunks))
            balanced = _improved(costs, owners, starts)
        return min(even, balanced, key=lambda counts: [max(each) for each in _costs_of(costs, counts, owners)])

    def fits(self, blocks: int, placement: Placement) -> bool:
        """Returns True if every chunk gets a block and every block a chunk."""
        if self.first_blocks is None and self.last_blocks is None:
            return blocks >= placement.chunks
        counts = self._evenly(blocks, placement)
        return sum(counts) == blocks and min(counts) > 0

    def _evenly(self, blocks: int, placement: Placement) -> list[int]:
        """Equal numbers of blocks, except for requested ones, counting the ends by their weights."""
        counts = [0] * placement.chunks
        for rank, number in ((0, self.first_blocks), (placement.ranks - 1, self.last_blocks)):
            chunks = placement.chunks_of(rank)
            for position, chunk in enumerate(chunks if number is not None else ()):
                counts[chunk] = ((number or 0) + len(chunks) - 1 - position) // len(chunks)
        free = [chunk for chunk, count in enumerate(counts) if not count]
        if free:
            owners, order = ([listed[chunk] for chunk in free] for listed in (placement.owners, _preferred(placement)))
            ones = [1] * (blocks - sum(counts))
            for chunk, count in zip(free, _balanced(ones, (self.first, self.last), owners, order), strict=True):
                counts[chunk] = count
        return counts


BY_COST, EVENLY = Division(), Division(by_cost=False)


def _preferred(placement: Placement) -> list[int]:
    """Each chunk's position in the order in which chunks of equal cost get an additional block."""
    chunks = list(range(placement.chunks))
    if placement.chunks > placement.ranks and placement.owner(chunks[-1]) == 0:
        order = [*reversed(chunks[: placement.ranks]), *chunks[placement.ranks :]]
    else:
        order = [*chunks[1:-1], chunks[0], chunks[-1]]
    return [order.index(chunk) for chunk in chunks]


def _balanced(blocks: Sequence[int], ends: tuple[int, int], owners: Sequence[int], order: Sequence[int]) -> list[int]:
    """Block counts that minimize the cost of the most expensive rank, if all blocks had their mean cost.

    Each block goes to the rank with the lowest cost so far, and there to the chunk with the lowest cost.

    Args:
        owners: the rank of each chunk.
        order: each chunk's position in the order in which chunks of equal cost get a block.
    """
    block = sum(blocks)  # costs are scaled by the number of blocks, to stay integers
    chunks = [block] * len(owners)
    chunks[0] += ends[0] * len(blocks)
    chunks[-1] += ends[1] * len(blocks)
    ranks = dict.fromkeys(owners, 0)
    for owner, cost in zip(owners, chunks, strict=True):
        ranks[owner] += cost
    counts = [1] * len(owners)
    for _ in range(len(blocks) - len(owners)):
        _, _, _, chunk = min((ranks[owner], chunks[chunk], order[chunk], chunk) for chunk, owner in enumerate(owners))
        counts[chunk] += 1
        chunks[chunk] += block
        ranks[owners[chunk]] += block
    return counts


def _costs_of(costs: Sequence[int], counts: Sequence[int], owners: Sequence[int]) -> tuple[list[int], list[int]]:
    """Costs of ranks and of chunks, the largest first."""
    chunks = [sum(costs[start:end]) for start, end in pairwise(accumulate(counts, initial=0))]
    ranks = dict.fromkeys(owners, 0)
    for owner, cost in zip(owners, chunks, strict=True):
        ranks[owner] += cost
    return sorted(ranks.values(), reverse=True), sorted(chunks, reverse=True)


def _improved(costs: Sequence[int], owners: Sequence[int], starts: Sequence[list[int]]) -> list[int]:
    """The best of some divisions, improved by moving single blocks between chunks."""

    def better(counts: list[int]) -> list[int] | None:
        least = _costs_of(costs, counts, owners)
        for giver, taker in permutations(range(len(counts)), 2):
            moved = [count - (chunk == giver) + (chunk == taker) for chunk, count in enumerate(counts)]
            if min(moved) > 0 and _costs_of(costs, moved, owners) < least:
                return moved
        return None

    best = min(starts, key=lambda counts: _costs_of(costs, counts, owners))
    while (moved := better(best)) is not None:
        best = moved
    return best


def _with_least_chunks(costs: Sequence[int], chunks: int) -> list[int]:
    """Counts of consecutive blocks that minimize the cost of the most expensive chunk, by bisection."""
    low, high = max(costs), sum(costs)
    while low < high:
        limit = (low + high) // 2
        if len(_filled(costs, chunks, limit)) <= chunks:
            high = limit
        else:
            low = limit + 1
    return _filled(costs, chunks, low)


def _filled(costs: Sequence[int], chunks: int, limit: int) -> list[int]:
    """Fills one chunk after another up to `limit`, keeping a block for each later one; may return more than `chunks`
    counts.
    """
    counts, spent = [0], 0
    for index, cost in enumerate(costs):
        left = len(costs) - index
        if counts[-1] and (spent + cost > limit or left <= chunks - len(counts)):
            counts.append(0)
            spent = 0
        counts[-1] += 1
        spent += cost
    return counts
