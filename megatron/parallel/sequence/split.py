"""The split of samples over the ranks of a sequence."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.errors import DataError
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.messages import all_reduce_sum

_MOST_BLOCKS = 64  # of a rank, if documents make the work uneven
_EVEN_ENOUGH = 1.03  # accepted ratio of the largest work of a rank to the mean


@dataclass(frozen=True)
class SequenceSplit:
    """The split of each sample's tokens over ranks.

    The ranks of the ring get parts of equal length and about equal attention cost; the ranks of Ulysses get consecutive
    shards of each part.

    Args:
        ring: the ranks that pass keys and values around.
        ulysses: the ranks that exchange positions for heads.
        causal: tokens attend only to earlier ones, so a later token costs more.
        by_document: tokens attend only to their own document.
        window: the most tokens that a token attends to, itself included; None for any number. If layers differ, the
            largest.
    """

    ring: Axis
    ulysses: Axis
    causal: bool = True
    by_document: bool = False
    window: int | None = None

    @classmethod
    def of(
        cls, mesh: ParallelMesh, *, causal: bool, by_document: bool, window: int | None = None
    ) -> SequenceSplit | None:
        """The split over the axes of a mesh; None if ranks share no sequences."""
        if mesh.cp.size * mesh.sp.size == 1:
            return None
        return cls(mesh.cp, mesh.sp, causal, by_document, window)

    @property
    def size(self) -> int:
        """Number of ranks that share a sequence."""
        return self.ring.size * self.ulysses.size

    def padded(self, length: int, within: int = 1) -> int:
        """The length that samples are padded to: divisible by the split, and each rank's part by `within`."""
        unit = math.lcm(length_unit(self.ring.size, self.ulysses.size, causal=self.causal), self.size * within)
        return -(-length // unit) * unit

    def summed(self, counts: torch.Tensor) -> torch.Tensor:
        """The sum of each rank's counts over the whole samples, in new memory."""
        return all_reduce_sum(all_reduce_sum(counts.clone(), self.ring), self.ulysses)

    def parts(self, length: int, segment_ids: np.ndarray | None = None) -> np.ndarray:
        """The positions of the tokens of each rank of the ring, ascending.

        A causal sample is cut into two blocks per rank, an early and a late one, or into more if documents or a window
        make the work uneven.

        Shapes: segment_ids `[b, s]`; result int64 `[b, ring, s/ring]`, b = 1 if all samples are split alike.

        Raises:
            DataError: the length cannot be divided.
        """
        ranks = self.ring.size
        unit = length_unit(ranks, self.ulysses.size, causal=self.causal)
        if length % unit:
            raise DataError(
                f"A sample of {length} tokens cannot be divided over {self.size} ranks (--context-parallel-size, "
                f"--ds-sequence-parallel-size). Use lengths that are multiples of {unit}."
            )
        if ranks == 1 or not self.causal:
            return np.arange(length).reshape(1, ranks, -1)
        if segment_ids is None or not self.by_document:
            segment_ids = np.zeros((1, length), np.int64)
        return np.stack([balanced_parts(_visible_tokens(row, self.window), ranks) for row in segment_ids])

    def positions(self, length: int, segment_ids: np.ndarray | None = None) -> np.ndarray:
        """The positions of this rank's tokens. Shapes: as in `parts`; result int64 `[b or 1, s/size]`."""
        part = self.parts(length, segment_ids)[:, self.ring.rank]
        return np.split(part, self.ulysses.size, axis=1)[self.ulysses.rank]


def length_unit(ring: int, ulysses: int, *, causal: bool) -> int:
    """The number that the length of a sample must be a multiple of; a ring cuts causal ones into two blocks a rank."""
    return math.lcm(2 * ring if causal and ring > 1 else ring, ring * ulysses)


def balanced_parts(work: np.ndarray, ranks: int) -> np.ndarray:
    """Divides tokens into parts of equal length and nearly equal work, with as few blocks as possible.

    Blocks, the costliest first, go to the rank with the least work that has room. With two blocks a rank, a causal
    sample gets the usual zigzag split: blocks i and 2 * ranks - 1 - i for rank i.

    Shapes: work `[s]`, of each token; result int64 `[ranks, s/ranks]`, ascending.
    """
    best, parts = math.inf, np.zeros((0, 0), np.int64)
    each = 2
    while each <= _MOST_BLOCKS and len(work) % (ranks * each) == 0:
        blocks = work.reshape(ranks * each, -1).sum(axis=1)
        owners = _owners(blocks, ranks, each)
        most = np.bincount(owners, blocks).max() * ranks / blocks.sum()
        if most < best:
            best = most
            chosen = np.argsort(owners, kind="stable").reshape(ranks, each)
            width = len(work) // (ranks * each)
            parts = (chosen[:, :, None] * width + np.arange(width)).reshape(ranks, -1)
        if best <= _EVEN_ENOUGH:
            break
        each *= 2
    return parts


def _owners(blocks: Sequence[int] | np.ndarray, ranks: int, each: int) -> np.ndarray:
    """The rank of each block, with `each` blocks for every rank. Shapes: `[blocks]` to the same."""
    owners = np.zeros(len(blocks), np.int64)
    loads = [(0, 0, rank) for rank in range(ranks)]  # work, blocks, rank
    for block in np.argsort(-np.asarray(blocks), kind="stable"):
        load, count, rank = heapq.heappop(loads)
        owners[block] = rank
        if count + 1 < each:
            heapq.heappush(loads, (load + int(blocks[block]), count + 1, rank))
    first = [int(np.flatnonzero(owners == rank)[0]) for rank in range(ranks)]
    return np.argsort(np.argsort(first))[owners]  # ranks in the order of their first blocks


def _visible_tokens(segment_ids: np.ndarray, window: int | None) -> np.ndarray:
    """Number of tokens that each token sees. Shapes: `[s]` to the same."""
    positions = np.arange(len(segment_ids))
    is_first = np.concatenate([[True], segment_ids[1:] != segment_ids[:-1]])
    visible = positions - np.maximum.accumulate(np.where(is_first, positions, 0)) + 1
    return visible if window is None else np.minimum(visible, window)
