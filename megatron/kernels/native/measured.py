"""How fast each implementation was measured to be, in times of torch's: what `--kernels auto` goes by."""

from __future__ import annotations

import types
from collections.abc import Mapping

from megatron.kernels.choice import Implementation

# Geometric means over sizes, float32 and bfloat16, one and two threads, forward and with backward. A device that
# nothing was measured on has no entries, so torch is used there; no GPU has been measured.
# Source: `python benchmarks/kernels_cpu.py` on an x86-64 CPU with AVX-512 (benchmarks/RESULTS.md, "Compiled kernels").
_CPU: Mapping[str, float] = types.MappingProxyType(
    {
        "softmax": 2.05,
        "norm": 1.83,
        "activation": 2.14,
        "dropout_add": 2.94,
        "rotary": 3.07,
        "cross_entropy": 2.31,
        "optimizer": 1.16,
        "embedding": 0.97,
        "initial_values": 11.99,
    }
)
SPEEDS: Mapping[tuple[str, str], Mapping[Implementation, float]] = types.MappingProxyType(
    {(operation, "cpu"): types.MappingProxyType({Implementation.CSRC: speed}) for operation, speed in _CPU.items()}
)


def fastest(operation: str, device_type: str, available: frozenset[Implementation]) -> Implementation:
    """The fastest implementation of those that are there; torch unless another was measured to be faster."""
    speeds = {Implementation.TORCH: 1.0, **SPEEDS.get((operation, device_type), {})}
    return max((speed, found) for found, speed in speeds.items() if found in available)[1]
