"""Time limits on ranks that are silent or without progress, and the intervals derived from them."""

from __future__ import annotations

from dataclasses import dataclass

# Time for a rank that fails because another one exited to close its files before it is terminated.
WIND_DOWN_SECONDS = 2.0
# How much longer a rank waits for both coordinators than a coordinator for a rank, before it decides by itself.
ALONE_SECONDS = 5.0
PING_SECONDS = 1.5


@dataclass(frozen=True)
class WatchLimits:
    """The time limits of a run.

    Attributes:
        hang_seconds: a rank without progress or heartbeat for this long hangs; 0 for no limit.
        start_seconds: the limit on progress until all ranks have finished their first step.
    """

    hang_seconds: float
    start_seconds: float

    @property
    def beat_seconds(self) -> float:
        """Interval between two heartbeats of a rank."""
        return max(1.0, self.hang_seconds / 10) if self.hang_seconds else 5.0

    @property
    def answer_seconds(self) -> float:
        """Time for all ranks to send their stacks."""
        return min(5.0, max(1.0, self.hang_seconds / 4))

    @property
    def closing_seconds(self) -> float:
        """Time for failed ranks to finish writing a checkpoint, if no rank is lost."""
        return max(WIND_DOWN_SECONDS, self.hang_seconds or 60.0)

    @property
    def nap_seconds(self) -> float:
        """A process that wakes up this late was suspended with the whole job; the time is not counted."""
        return max(1.0, self.hang_seconds / 4)
