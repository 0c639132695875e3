"""Capabilities of the pipeline engines: schedules and ZeRO stages. Rules refuse everything else."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass

# Minimum and maximum number of model chunks per rank; None for no maximum.
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
# Schedules that compute weight gradients separately from input gradients, each with the closest one that does not.
SPLIT_SCHEDULES: Mapping[str, str] = types.MappingProxyType(
    {"zb-h1": "1f1b", "interleaved-zb": "interleaved", "zbv": "v-1f1b", "v-half": "v-1f1b"}
)


def is_schedule_file(schedule: str | None) -> bool:
    """Returns True for a schedule file, `FILE.csv`, False for a named schedule."""
    return schedule is not None and schedule.lower().endswith(".csv")


@dataclass(frozen=True)
class PipelineCapabilities:
    """Capabilities of a pipeline engine.

    Attributes:
        schedules: names of `SCHEDULE_CHUNKS`.
        reads_files: True if it runs schedules from files.
        zero_stages: the ZeRO stages it supports with more than one model chunk.
    """

    schedules: tuple[str, ...]
    reads_files: bool
    zero_stages: tuple[int, ...]

    def runs(self, schedule: str) -> bool:
        """Returns True if the engine runs a schedule, given by name or file."""
        return self.reads_files if is_schedule_file(schedule) else schedule in self.schedules


OWN, DEEPSPEED = "own", "deepspeed"
DEFAULT_ENGINE = OWN
ENGINES: Mapping[str, PipelineCapabilities] = types.MappingProxyType(
    {
        OWN: PipelineCapabilities(schedules=tuple(SCHEDULE_CHUNKS), reads_files=True, zero_stages=(0, 1, 2)),
        DEEPSPEED: PipelineCapabilities(schedules=("1f1b",), reads_files=False, zero_stages=(0, 1)),
    }
)
