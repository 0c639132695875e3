"""The most floating-point operations that a device can do in a second, by its name.

In bfloat16 with dense matrices: half of the figure that data sheets call "with sparsity".

Source: NVIDIA's data sheets of these devices.
"""

from __future__ import annotations

_TERA = 1e12

# Words that must all be in the device's name, and TFLOP/s. The first row that fits counts.
_PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("B200",), 2250.0),
    (("H200", "NVL"), 835.5),
    (("H200",), 989.4),
    (("GH200",), 989.4),
    (("H100", "NVL"), 835.5),
    (("H100", "PCIe"), 756.0),
    (("H100",), 989.4),
    (("H800", "PCIe"), 756.0),
    (("H800",), 989.4),
    (("H20",), 148.0),
    (("A100",), 312.0),
    (("A800",), 312.0),
    (("A30",), 165.0),
    (("A40",), 149.7),
    (("A10G",), 70.0),
    (("A10",), 125.0),
    (("L40S",), 362.1),
    (("L40",), 181.1),
    (("L4",), 121.0),
)


def peak_flops_per_second(device_name: str, *, is_half_precision: bool, given_teraflops: float | None) -> float | None:
    """The peak of a device; None where it is not known.

    Args:
        device_name: as the driver gives it, such as "NVIDIA A100-SXM4-80GB".
        is_half_precision: whether matrices are multiplied in bfloat16 or float16; the table knows no other peaks.
        given_teraflops: what the user says that it is (--peak-tflops).
    """
    if given_teraflops is not None:
        return given_teraflops * _TERA
    if not is_half_precision:
        return None
    words = set(device_name.replace("-", " ").split())
    return next((peak * _TERA for names, peak in _PEAKS if words.issuperset(names)), None)
