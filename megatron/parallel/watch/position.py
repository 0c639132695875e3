"""The position of a rank in its run: the phase and step that its main thread entered last, and when."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.parallel.watch.wire import MessageFields

START, END = "init", "end"

# In the order of a run; a rank may alternate between `forward`, `p2p` and `backward`.
PHASES = (START, "data", "forward", "p2p", "backward", "step", "evaluation", "save", END)
_ALTERNATING = frozenset({"forward", "p2p", "backward"})


class RankPace(NamedTuple):
    """The work of a rank so far, without its waits for others.

    Attributes:
        data_milliseconds: time that it waited for its batches.
        computing_milliseconds: time of its steps, without messages.
    """

    steps: int = 0
    data_milliseconds: int = 0
    computing_milliseconds: int = 0


NO_PACE = RankPace()


class Position(NamedTuple):
    """The last progress of the main thread of a rank.

    Attributes:
        phase: one of `PHASES`.
        step: the step that is being trained; outside training, the last one.
        events: number of times this rank has made progress.
        at_seconds: `time.monotonic()` at that progress.
        pace: the work of the rank so far.
    """

    phase: str
    step: int
    events: int
    at_seconds: float
    pace: RankPace = NO_PACE


def first_position() -> Position:
    """The position of a rank that is starting."""
    return Position(START, 0, 0, time.monotonic())


@dataclass(frozen=True)
class Heartbeat:
    """A rank's position as it is sent to the coordinators.

    Attributes:
        idle_seconds: time since its last progress.
        is_starting: the rank has not finished its first step, which may take much longer than others.
    """

    phase: str = START
    step: int = 0
    events: int = 0
    idle_seconds: float = 0.0
    is_starting: bool = True
    pace: RankPace = NO_PACE

    @classmethod
    def read(cls, fields: MessageFields) -> Heartbeat:
        """Reads what `values` wrote.

        Raises:
            ValueError: no rank wrote it.
        """
        phase = PHASES[fields.whole("phase", len(PHASES) - 1)]
        pace = fields.wholes("pace", 2**53, len(NO_PACE))
        if len(pace) != len(NO_PACE):
            raise ValueError("pace must have three numbers")
        return cls(
            phase,
            fields.whole("step"),
            fields.whole("events"),
            fields.seconds("idle"),
            fields.flag("starting"),
            RankPace(*pace),
        )

    def values(self) -> dict[str, Any]:
        return {
            "phase": PHASES.index(self.phase),
            "step": self.step,
            "events": self.events,
            "idle": round(self.idle_seconds, 3),
            "starting": self.is_starting,
            "pace": list(self.pace),
        }

    def progress(self) -> tuple[int, int, int]:
        """A sort key, smaller for a rank that is behind; phases that alternate are compared by `events`."""
        phase = "forward" if self.phase in _ALTERNATING else self.phase
        return self.step, PHASES.index(phase), self.events

    def __str__(self) -> str:
        named = {START: "start-up", END: "shutdown"}
        return named.get(self.phase, f"phase {self.phase} of step {self.step}")
