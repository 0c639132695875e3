"""How long ranks may be silent or without progress, and the intervals that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

# How long a rank that meets an error because another one ended may take to close its files before it is ended.
WIND_DOWN_SECONDS = 2.0
# How much longer a rank waits for both hubs than a hub waits for a rank, before it speaks for itself.
ALONE_SECONDS = 5.0
PING_SECONDS = 1.5


@dataclass(frozen=True)
class WatchLimits:
    """The time limits of a run.

    Attributes:
        hang_seconds: without progress or without a sign of life for this long, a rank hangs; 0 for no limit.
        start_seconds: how long it may be without progress until all ranks have finished their first step.
    """

    hang_seconds: float
    start_seconds: float

    @property
    def beat_seconds(self) -> float:
        """Between two signs of life of a rank."""
        return max(1.0, self.hang_seconds / 10) if self.hang_seconds else 5.0

    @property
    def answer_seconds(self) -> float:
        """How long all ranks have for their stacks."""
        return min(5.0, max(1.0, self.hang_seconds / 4))

    @property
    def closing_seconds(self) -> float:
        """How long ranks that failed, all of which are there, may take to finish a save that is being written."""
        return max(WIND_DOWN_SECONDS, self.hang_seconds or 60.0)

    @property
    def nap_seconds(self) -> float:
        """A process that wakes up this much too late was stopped with the whole job, and does not count that time."""
        return max(1.0, self.hang_seconds / 4)
