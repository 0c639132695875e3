"""Plans and dry runs, which examine a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class PlanningConfig(ConfigSection):
    """A plan or a dry run in place of training, and the machines to plan for."""

    plan_only: bool = flag(
        False, "do not train; print memory, time and communication of this layout, and faster layouts"
    )
    dry_run_ranks: int | None = flag(
        None,
        "do not train; simulate this many ranks in one process, without their memory, and check that their "
        "communication matches",
        at_least=1,
        at_most=1_048_576,
    )
    planned_devices: int | None = flag(
        None, "number of devices to plan for; the number of processes if unset", spelled=("--devices",), at_least=1
    )
    planned_device: str = flag(
        "h100",
        "type of device to plan for: h100, h200, a100, a100-40gb, b200, or FILE.json with its constants",
        spelled=("--device",),
    )
    nodes: int | None = flag(None, "number of nodes to plan for; with 8 devices each if unset", at_least=1)
    interconnect: str | None = flag(
        None, "interconnect to plan for, within and between nodes; the device's usual one if unset"
    )
    device_hour_price: float | None = flag(None, "price per device hour, for the cost in a plan", at_least=0)
