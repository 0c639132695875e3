"""The tiles of queries and keys that a rank of a ring computes; tiles without visible pairs are skipped."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_SMALLEST_BLOCK, _LARGEST_BLOCK = 128, 1024  # tokens along each side of a block with a bias


@dataclass(frozen=True)
class Tile:
    """A range of a rank's queries, and a range of the keys of the same or another rank.

    Attributes:
        row: the sample; None for all samples.
        causal: each query sees the keys up to its own; otherwise all of them, unless `biased`.
        biased: a bias depends on distances, or hides some pairs.
    """

    row: int | None
    queries: slice
    keys: slice
    causal: bool = False
    biased: bool = False

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that are computed."""
        queries, keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return queries * (queries + 1) // 2 if self.causal else queries * keys


@dataclass(frozen=True)
class Visibility:
    """The tokens that a token attends to.

    Attributes:
        bidirectional: it sees later tokens.
        window: number of tokens that it sees, itself included; None for all.
        sloped: scores depend on distances (ALiBi).
        in_blocks: the scores of a block are materialized, so blocks must be small.
    """

    bidirectional: bool = False
    window: int | None = None
    sloped: bool = False
    in_blocks: bool = False

    @property
    def block(self) -> int | None:
        """Maximum side of a tile in tokens; None without a limit."""
        if self.window is not None:
            return min(max(self.window, _SMALLEST_BLOCK), _LARGEST_BLOCK)
        return _LARGEST_BLOCK if self.sloped or self.in_blocks else None


@dataclass(frozen=True)
class _Run:
    """Consecutive positions of one document that are contiguous among a rank's tokens."""

    start: int
    stop: int
    first: int  # position in the sample
    document: int

    @property
    def last(self) -> int:
        return self.first + self.stop - self.start - 1


def tiles_of(parts: np.ndarray, segment_ids: np.ndarray | None, rank: int, seen: Visibility) -> list[list[Tile]]:
    """The tiles of a rank of the ring for the keys of each rank.

    Every query is in a tile of the rank's own keys, which comes before other tiles of the same query.

    Shapes: parts `[b or 1, ranks, n]`, segment_ids `[b, s]` int64, or None if documents are not separated.
    """
    ranks = parts.shape[1]
    if segment_ids is None:
        rows: list[int | None] = [None] if len(parts) == 1 else list(range(len(parts)))
    else:
        rows = list(range(len(segment_ids)))
    tiles: list[list[Tile]] = [[] for _ in range(ranks)]
    for row in rows:
        of_ranks = parts[0 if len(parts) == 1 or row is None else row]
        documents = np.zeros(of_ranks.size, np.int64) if segment_ids is None else segment_ids[row or 0]
        runs = [_runs(positions, documents[positions], seen.block) for positions in of_ranks]
        for source in range(ranks):
            tiles[source] += _tiles(row, runs[rank], runs[source], seen, is_same_rank=source == rank)
    return tiles


def _runs(positions: np.ndarray, documents: np.ndarray, block: int | None) -> list[_Run]:
    is_edge = (np.diff(positions) != 1) | (np.diff(documents) != 0)
    if block is not None:
        is_edge |= np.diff(positions // block) != 0
    edges = [0, *(np.flatnonzero(is_edge) + 1).tolist(), len(positions)]
    pairs = itertools.pairwise(edges)
    return [_Run(start, stop, int(positions[start]), int(documents[start])) for start, stop in pairs]


def _tiles(
    row: int | None, queries: list[_Run], keys: list[_Run], seen: Visibility, *, is_same_rank: bool
) -> list[Tile]:
    """The tiles of a sample, the diagonal first."""
    if is_same_rank and seen.block is None and not seen.bidirectional:
        return [Tile(row, part, part, causal=True) for part in _documents(queries)]
    diagonal = [_diagonal(row, run, seen) for run in queries] if is_same_rank and seen.block is not None else []
    by_document: dict[int, list[_Run]] = {}
    for run in queries:
        by_document.setdefault(run.document, []).append(run)
    biased: list[Tile] = []
    ranges: list[tuple[list[slice], slice]] = []  # queries that see the same keys in full
    for key in keys:
        full: list[slice] = []
        for query in by_document.get(key.document, []):
            if diagonal and query == key:
                continue
            visible = _is_visible(query, key, seen)
            if visible is None:
                biased.append(Tile(row, slice(query.start, query.stop), slice(key.start, key.stop), biased=True))
            elif visible and full and full[-1].stop == query.start and seen.block is None:
                full[-1] = slice(full[-1].start, query.stop)
            elif visible:
                full.append(slice(query.start, query.stop))
        if ranges and full == ranges[-1][0] and seen.block is None:
            ranges[-1] = (full, slice(ranges[-1][1].start, key.stop))
        elif full:
            ranges.append((full, slice(key.start, key.stop)))
    return [*diagonal, *biased, *(Tile(row, query, key) for full, key in ranges for query in full)]


def _diagonal(row: int | None, run: _Run, seen: Visibility) -> Tile:
    part, length = slice(run.start, run.stop), run.stop - run.start
    is_bounded = seen.sloped or (seen.window is not None and seen.window < length)
    return Tile(row, part, part, causal=not is_bounded and not seen.bidirectional, biased=is_bounded)


def _is_visible(query: _Run, key: _Run, seen: Visibility) -> bool | None:
    """True if all pairs of two disjoint runs are visible without bias, False if none is, None otherwise."""
    is_later = key.first > query.last
    if is_later and not seen.bidirectional:
        return False
    nearest = key.first - query.last if is_later else query.first - key.last
    furthest = key.last - query.first if is_later else query.last - key.first
    if seen.window is not None and nearest >= seen.window:
        return False
    return None if seen.sloped or (seen.window is not None and furthest >= seen.window) else True


def _documents(runs: list[_Run]) -> Iterator[slice]:
    """A rank's range of each document, in order."""
    start = 0
    for index, run in enumerate(runs):
        if index + 1 == len(runs) or runs[index + 1].document != run.document:
            yield slice(runs[start].start, run.stop)
            start = index + 1
