"""The slowest rank of a run, by the timings that ranks report.

Communication, where fast ranks wait for slow ones, is excluded. Ranks are compared within their pipeline stage,
where all have the same work.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

PHASES = ("data", "computation")
# A straggler was slowest in this many consecutive reports, each time by this factor.
REPORTS_TO_NAME = 3
_STRAGGLER_RATIO = 1.1


@dataclass(frozen=True)
class StragglerReport:
    """The slowest rank since the previous report.

    Attributes:
        phase: the rank's slowest phase relative to the others, one of `PHASES`.
        worst_seconds: time per step of this phase on that rank.
        median_seconds: the median over ranks with the same work.
        times: number of reports so far with this rank as the slowest.
        is_straggler: the rank was slowest, by a tenth or more, in the last `REPORTS_TO_NAME` reports.
    """

    rank: int
    ranks: int
    phase: str
    worst_seconds: float
    median_seconds: float
    times: int
    reports: int
    is_straggler: bool

    @property
    def ratio(self) -> float:
        """Time of the rank relative to the median."""
        return self.worst_seconds / self.median_seconds if self.median_seconds else float("inf")


@final
class RankTimings:
    """Compares the timings of the ranks between reports.

    Args:
        peers_of: maps a rank to its group of ranks with the same work.
    """

    def __init__(self, peers_of: Callable[[int], int]) -> None:
        self._peers_of = peers_of
        self._before: dict[int, tuple[int, ...]] = {}
        self._times: Counter[int] = Counter()
        self._reports = 0
        self._streak = (-1, 0)  # a rank, and its number of consecutive reports as a straggler

    def report(self, paces: Mapping[int, Sequence[int]]) -> StragglerReport | None:
        """The slowest rank since the previous report; None if too few ranks have reported.

        Args:
            paces: by rank, the number of steps and the milliseconds in each phase, both since its start.
        """
        seconds: dict[int, list[float]] = {}
        for rank, pace in paces.items():
            before = self._before.get(rank, (0,) * len(pace))
            steps = pace[0] - before[0]
            if steps > 0:
                seconds[rank] = [(now - then) / steps / 1e3 for now, then in zip(pace[1:], before[1:], strict=True)]
                self._before[rank] = tuple(pace)
        groups: dict[int, list[int]] = {}
        for rank in seconds:
            groups.setdefault(self._peers_of(rank), []).append(rank)
        candidates = []
        for peers in groups.values():
            for phase, name in enumerate(PHASES if len(peers) > 1 else ()):
                median = statistics.median(seconds[rank][phase] for rank in peers)
                worst_seconds, worst = max((seconds[rank][phase], rank) for rank in peers)
                candidates.append((worst_seconds - median, worst, name, worst_seconds, median, peers))
        if not candidates:
            return None
        behind, rank, name, worst_seconds, median_seconds, peers = max(candidates)
        whole = statistics.median(sum(seconds[peer]) for peer in peers)
        self._reports += 1
        self._times[rank] += 1
        is_far = behind >= (_STRAGGLER_RATIO - 1) * whole and behind > 0
        self._streak = (rank, (self._streak[1] if self._streak[0] == rank else 0) + 1) if is_far else (-1, 0)
        return StragglerReport(
            rank,
            len(seconds),
            name,
            worst_seconds,
            median_seconds,
            self._times[rank],
            self._reports,
            self._streak[1] >= REPORTS_TO_NAME,
        )
