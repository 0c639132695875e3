"""Measured speeds of the implementations relative to torch; the basis of `--kernels auto`."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.kernels.choice import Implementation


@dataclass(frozen=True)
class Measurement:
    """Measured speeds of the compiled operations on one kind of device: geometric means of torch's time over theirs.

    Attributes:
        hardware: the device.
        torch: the version compared with.
        date: year, month and day.
        command: the command that prints the figures.
        speeds: speed by operation of `--kernels`; an operation that was not measured uses torch.
    """

    hardware: str
    torch: str
    date: str
    command: str
    speeds: Mapping[str, float] = field(default_factory=dict)


MEASURED: Mapping[str, Measurement] = types.MappingProxyType(
    {
        # Over four sizes, float32 and bfloat16, one and two threads, forward and with backward.
        "cpu": Measurement(
            "an x86-64 CPU with AVX-512",
            "2.13.0",
            "2026-11-22",
            "python benchmarks/kernels_cpu.py --table",
            types.MappingProxyType(
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
            ),
        ),
        # Over three sizes, one of them odd, bfloat16 (AdamW: float32), forward and with backward; torch's are eager.
        "cuda": Measurement(
            "one NVIDIA H100 80GB HBM3",
            "2.11.0+cu130",
            "2026-11-23",
            "python -m benchmarks.gpu --output FOLDER --parts build,ops",
            types.MappingProxyType(
                {
                    "softmax": 3.42,
                    "norm": 2.03,
                    "activation": 1.73,
                    "dropout_add": 3.77,
                    "rotary": 8.21,
                    "cross_entropy": 7.67,
                    "optimizer": 1.11,
                    "embedding": 1.49,
                    "initial_values": 1395.0,
                }
            ),
        ),
    }
)


def speeds_of(operation: str, device_type: str) -> Mapping[Implementation, float]:
    """The measured speeds of an operation on a device, torch's being 1."""
    measurement = MEASURED.get(device_type)
    if measurement is None or operation not in measurement.speeds:
        return {}
    return {Implementation.CSRC: measurement.speeds[operation]}


def fastest(operation: str, device_type: str, available: frozenset[Implementation]) -> Implementation:
    """The fastest available implementation; torch unless another was measured to be faster."""
    speeds = {Implementation.TORCH: 1.0, **speeds_of(operation, device_type)}
    return max((speed, implementation) for implementation, speed in speeds.items() if implementation in available)[1]
