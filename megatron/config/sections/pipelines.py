"""What each pipeline engine runs: its schedules, and the ZeRO stages it goes with.

These tables decide what is refused; a change of what an engine can do is a change here and nowhere else.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass

# The fewest and the most chunks of the network that a rank may hold; None for any number.
SCHEDULE_CHUNKS: Mapping[str, tuple[int, int | None]] = types.MappingProxyType(
    {
        "1f1b": (1, 1),
        "interleaved": (2, None),
        "zb-h1": (1, 1),
        "interleaved-zb": (2, None),
        "zbv": (2, 2),
        "v-half": (2, 2),
        "v-1f1b": (2, 2),
    }
)
# Those that compute the gradients of weights apart from those of inputs, each with the nearest that does not.
SPLIT_SCHEDULES: Mapping[str, str] = types.MappingProxyType(
    {"zb-h1": "1f1b", "interleaved-zb": "interleaved", "zbv": "v-1f1b", "v-half": "v-1f1b"}
)


def is_schedule_file(schedule: str | None) -> bool:
    """Whether a schedule is that of a file, `FILE.csv`, and not one with a name."""
    return schedule is not None and schedule.lower().endswith(".csv")


@dataclass(frozen=True)
class PipelineCapabilities:
    """What a pipeline engine can do.

    Attributes:
        schedules: names of `SCHEDULE_CHUNKS`.
        reads_files: whether it runs schedules from files.
        zero_stages: the ZeRO stages that it goes with where there is more than one chunk of the network.
    """

    schedules: tuple[str, ...]
    reads_files: bool
    zero_stages: tuple[int, ...]

    def runs(self, schedule: str) -> bool:
        """Whether a schedule, by its name or file, can be run."""
        return self.reads_files if is_schedule_file(schedule) else schedule in self.schedules


OWN, DEEPSPEED = "own", "deepspeed"
DEFAULT_ENGINE = OWN
ENGINES: Mapping[str, PipelineCapabilities] = types.MappingProxyType(
    {
        OWN: PipelineCapabilities(schedules=tuple(SCHEDULE_CHUNKS), reads_files=True, zero_stages=(0, 1, 2)),
        DEEPSPEED: PipelineCapabilities(schedules=("1f1b",), reads_files=False, zero_stages=(0, 1)),
    }
)
