"""Inspecting a run before it starts: a plan of its layouts, or a dry run of all its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class PlanningConfig(ConfigSection):
    """Plans and dry runs in place of training, and the machines they are for."""

    plan_only: bool = flag(
        False, "train nothing: show memory, time and messages of this layout, and the layouts that are faster"
    )
    dry_run_ranks: int | None = flag(
        None,
        "train nothing: walk the programs of this many ranks in one process, without their memory, and check that they "
        "fit each other",
        at_least=1,
        at_most=1_048_576,
    )
    planned_devices: int | None = flag(
        None, "devices to plan for; the processes that were started if unset", spelled=("--devices",), at_least=1
    )
    planned_device: str = flag(
        "h100",
        "devices to plan for: h100, h200, a100, a100-40gb, b200, or FILE.json with their constants",
        spelled=("--device",),
    )
    nodes: int | None = flag(None, "nodes to plan for; as many as 8 devices each need if unset", at_least=1)
    interconnect: str | None = flag(
        None, "links to plan for, within and between nodes; those of the device's own systems if unset"
    )
    device_hour_price: float | None = flag(None, "price of a device and hour, for the cost in a plan", at_least=0)
