"""Which rank of a run is slowest, in what, and how often it was: from what the ranks say of themselves.

Time in messages is left out, in which fast ranks wait for slow ones. Ranks are compared with those that have the same
work: those of the same pipeline stage.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

PHASES = ("data", "computation")
# A rank is named as a straggler if it was slowest in so many reports in a row, each time by this factor.
REPORTS_TO_NAME = 3
_STRAGGLER_RATIO = 1.1


@dataclass(frozen=True)
class StragglerReport:
    """One report.

    Attributes:
        phase: one of `PHASES`, in which the rank is furthest behind.
        worst_seconds: a step of it takes on that rank.
        median_seconds: the same on the ranks with the same work.
        times: in how many of the reports so far the rank was the slowest.
        is_straggler: whether it was in the last ones, by a tenth or more.
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
        """How much longer the rank takes than the median."""
        return self.worst_seconds / self.median_seconds if self.median_seconds else float("inf")


@final
class RankTimings:
    """Compares the ranks at each report with the report before.

    Args:
        peers_of: a number for each rank that is the same for ranks with the same work.
    """

    def __init__(self, peers_of: Callable[[int], int]) -> None:
        self._peers_of = peers_of
        self._before: dict[int, tuple[int, ...]] = {}
        self._times: Counter[int] = Counter()
        self._reports = 0
        self._row = (-1, 0)  # a rank, and in how many reports in a row it was far behind

    def report(self, paces: Mapping[int, Sequence[int]]) -> StragglerReport | None:
        """The slowest rank since the report before; None if too few ranks have said anything since.

        Args:
            paces: for each rank the steps it has made, and the milliseconds of each phase, all since its start.
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
        self._row = (rank, (self._row[1] if self._row[0] == rank else 0) + 1) if is_far else (-1, 0)
        return StragglerReport(
            rank,
            len(seconds),
            name,
            worst_seconds,
            median_seconds,
            self._times[rank],
            self._reports,
            self._row[1] >= REPORTS_TO_NAME,
        )
