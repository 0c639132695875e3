"""How fast each implementation was measured to be, in times of torch's: what `--kernels auto` goes by."""

from __future__ import annotations

import types
from collections.abc import Mapping

from megatron.kernels.choice import Implementation

# By operation and device type. A device that nothing was measured on has no entries, so torch is used there.
# CPU: `python benchmarks/kernels_cpu.py`, see benchmarks/RESULTS.md.
SPEEDS: Mapping[tuple[str, str], Mapping[Implementation, float]] = types.MappingProxyType({})


def fastest(operation: str, device_type: str, available: frozenset[Implementation]) -> Implementation:
    """The fastest implementation of those that are there; torch unless another was measured to be faster."""
    speeds = {Implementation.TORCH: 1.0, **SPEEDS.get((operation, device_type), {})}
    return max((speed, found) for found, speed in speeds.items() if found in available)[1]
