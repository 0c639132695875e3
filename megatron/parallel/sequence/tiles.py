"""Which blocks of queries and keys a rank of a ring computes: only those in which something is visible."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_SMALLEST_BLOCK, _LARGEST_BLOCK = 128, 1024  # tokens along each side of a block with a bias


@dataclass(frozen=True)
class Tile:
    """Queries of a rank, and keys of it or another one, of consecutive places in what each has.

    Attributes:
        row: the sample; None for all samples.
        causal: each query sees the keys up to its own; otherwise all of them, or as `biased` says.
        biased: whether distances decide what is visible, or how much it counts.
    """

    row: int | None
    queries: slice
    keys: slice
    causal: bool = False
    biased: bool = False

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that are computed."""
        queries, keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return queries * (queries + 1) // 2 if self.causal else queries * keys


@dataclass(frozen=True)
class Visibility:
    """What a token sees.

    Attributes:
        bidirectional: whether it sees later tokens.
        window: how many tokens it sees, itself included; None for all.
        sloped: whether scores depend on distances (ALiBi).
        in_blocks: whether a block's scores are held, so that blocks are to be small.
    """

    bidirectional: bool = False
    window: int | None = None
    sloped: bool = False
    in_blocks: bool = False

    @property
    def block(self) -> int | None:
        """The most tokens along a side of a tile; None for any number."""
        if self.window is not None:
            return min(max(self.window, _SMALLEST_BLOCK), _LARGEST_BLOCK)
        return _LARGEST_BLOCK if self.sloped or self.in_blocks else None


@dataclass(frozen=True)
class _Span:
    """Consecutive places of one document that lie next to each other in what a rank has."""

    start: int
    stop: int
    first: int  # place in the sample
    document: int

    @property
    def last(self) -> int:
        return self.first + self.stop - self.start - 1


def tiles_of(parts: np.ndarray, segment_ids: np.ndarray | None, rank: int, seen: Visibility) -> list[list[Tile]]:
    """The tiles of a rank of the ring for the keys of each rank.

    Those for its own keys come before all others of the same queries, and every query is in one: it sees itself.

    Shapes: parts `[b or 1, ranks, n]`, segment_ids `[b, s]` int64, or None if documents are not separated.
    """
    ranks = parts.shape[1]
    if segment_ids is None:
        rows: list[int | None] = [None] if len(parts) == 1 else list(range(len(parts)))
    else:
        rows = list(range(len(segment_ids)))
    tiles: list[list[Tile]] = [[] for _ in range(ranks)]
    for row in rows:
        of_row = parts[0 if len(parts) == 1 or row is None else row]
        documents = np.zeros(of_row.size, np.int64) if segment_ids is None else segment_ids[row or 0]
        spans = [_spans(places, documents[places], seen.block) for places in of_row]
        for source in range(ranks):
            tiles[source] += _tiles(row, spans[rank], spans[source], seen, is_own=source == rank)
    return tiles


def _spans(places: np.ndarray, documents: np.ndarray, block: int | None) -> list[_Span]:
    begins = (np.diff(places) != 1) | (np.diff(documents) != 0)
    if block is not None:
        begins |= np.diff(places // block) != 0
    edges = [0, *(np.flatnonzero(begins) + 1).tolist(), len(places)]
    return [_Span(start, stop, int(places[start]), int(documents[start])) for start, stop in itertools.pairwise(edges)]


def _tiles(row: int | None, queries: list[_Span], keys: list[_Span], seen: Visibility, *, is_own: bool) -> list[Tile]:
    """The tiles of a sample, those of each query with itself first."""
    if is_own and seen.block is None and not seen.bidirectional:
        return [Tile(row, part, part, causal=True) for part in _documents(queries)]
    own = [_with_itself(row, span, seen) for span in queries] if is_own and seen.block is not None else []
    by_document: dict[int, list[_Span]] = {}
    for span in queries:
        by_document.setdefault(span.document, []).append(span)
    biased: list[Tile] = []
    ranges: list[tuple[list[slice], slice]] = []  # queries that see the same keys in full
    for key in keys:
        full: list[slice] = []
        for query in by_document.get(key.document, []):
            if own and query == key:
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
    return [*own, *biased, *(Tile(row, query, key) for full, key in ranges for query in full)]


def _with_itself(row: int | None, span: _Span, seen: Visibility) -> Tile:
    part, length = slice(span.start, span.stop), span.stop - span.start
    is_bounded = seen.sloped or (seen.window is not None and seen.window < length)
    return Tile(row, part, part, causal=not is_bounded and not seen.bidirectional, biased=is_bounded)


def _is_visible(query: _Span, key: _Span, seen: Visibility) -> bool | None:
    """Whether all pairs are visible and count alike, or none is; None for neither. The spans have no common place."""
    is_later = key.first > query.last
    if is_later and not seen.bidirectional:
        return False
    nearest = key.first - query.last if is_later else query.first - key.last
    furthest = key.last - query.first if is_later else query.last - key.first
    if seen.window is not None and nearest >= seen.window:
        return False
    return None if seen.sloped or (seen.window is not None and furthest >= seen.window) else True


def _documents(spans: list[_Span]) -> Iterator[slice]:
    """What a rank has of each document, in whose order it lies."""
    start = 0
    for index, span in enumerate(spans):
        if index + 1 == len(spans) or spans[index + 1].document != span.document:
            yield slice(spans[start].start, span.stop)
            start = index + 1
