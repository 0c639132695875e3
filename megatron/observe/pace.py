"""An estimate of when a run ends, from the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Times the run from step to step, with everything that a run does: steps, evaluations, saves.

    The first step holds one-off costs (compilation, memory, the first read of files), so it counts only until there is
    another.

    Args:
        clock: seconds from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: list[tuple[int, float]] = []

    def mark(self, step: int) -> None:
        """Notes that so many steps are complete; called when training starts and after each step."""
        now = self._clock()
        if self._marks and self._marks[-1][0] == step:
            return
        # The first two marks bound the first step; of all later ones only the newest is needed.
        del self._marks[2:]
        self._marks.append((step, now))

    def seconds_left(self, step: int, train_iterations: int) -> float | None:
        """The estimated time from the last mark to the last step; None before two marks."""
        if len(self._marks) < 2:
            return None
        (first, begun_at), (last, now) = self._marks[-2:] if len(self._marks) == 2 else self._marks[1:]
        return max(0, train_iterations - step) * (now - begun_at) / (last - first)
