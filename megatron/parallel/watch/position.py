"""Where a rank is in its run: the phase and step that its main thread entered last, and when."""

from __future__ import annotations

import time
from typing import NamedTuple

START, END = "init", "end"

# In the order of a run. A rank in `forward`, `p2p` and `backward` may alternate between them.
PHASES = (START, "data", "forward", "p2p", "backward", "step", "evaluation", "save", END)
_ALTERNATING = frozenset({"forward", "p2p", "backward"})


class Position(NamedTuple):
    """What the main thread of a rank was last seen doing.

    Attributes:
        phase: one of `PHASES`.
        step: the step that is being trained; outside training, the last one.
        events: how often this rank has made progress.
        at_seconds: `time.monotonic()` at that progress.
    """

    phase: str
    step: int
    events: int
    at_seconds: float

    def place(self) -> tuple[int, int, int]:
        """A value that is smaller for a rank that is behind; phases that alternate are compared by `events`."""
        phase = "forward" if self.phase in _ALTERNATING else self.phase
        return self.step, PHASES.index(phase), self.events


def first_position() -> Position:
    """The position of a rank that starts."""
    return Position(START, 0, 0, time.monotonic())
