"""The ranks of a run as a small drawing: a row for each pipeline stage, a bracket for each replica in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

_ROWS = 4
_BRACKETS = 4
_RANKS = 4


def rank_grid(stages: int, replicas: int, ranks_per_replica: int) -> list[str]:
    """The rows of the drawing; of a large run the first and the last of everything.

    Ranks are counted as the mesh does: along a replica's part of a stage first, then over replicas, then over stages.

    Args:
        ranks_per_replica: ranks that share the matrices or the positions of one stage of one replica.
    """
    rows = []
    for stage in _ends(range(stages), _ROWS):
        if stage is None:
            rows.append("  ...")
            continue
        first = stage * replicas * ranks_per_replica
        brackets = [
            "..." if replica is None else _bracket(first + replica * ranks_per_replica, ranks_per_replica)
            for replica in _ends(range(replicas), _BRACKETS)
        ]
        rows.append((f"stage {stage:<3} " if stages > 1 else "") + " ".join(brackets))
    return rows


def _bracket(first: int, count: int) -> str:
    ranks = range(first, first + count)
    return f"[{first}-{ranks[-1]}]" if count > _RANKS else f"[{' '.join(map(str, ranks))}]"


def _ends(items: Sequence[Item], most: int) -> list[Item | None]:
    """All items, or the first ones, None and the last one."""
    return list(items) if len(items) <= most else [*items[: most - 2], None, items[-1]]
