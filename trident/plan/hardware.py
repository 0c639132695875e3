"""Devices and links: their peaks, and the measured fractions of them."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.errors import ConfigError, printable
from megatron.files.settings import read_json
from megatron.observe.speed import peak_flops_per_second

_GIGA = 1e9
_GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A model of GPU.

    Attributes:
        name: as in `--device`.
        memory_bytes: allocatable by a process.
        peak: FLOP/s in bfloat16, from its data sheet.
        product_share: fraction of the peak that large matrix products reach.
        saturation: rows and columns at which a product reaches half of that fraction.
        attention_share: fraction of the peak of fused causal attention (unmasked scores), long samples and wide heads.
        attention_saturation: tokens, and channels of a head, at which attention reaches half of that fraction.
        memory_bandwidth: bytes/s read and written by a copy.
        traffic_share: fraction of that bandwidth that element-wise operations reach.
        host_seconds_per_layer: time of the host to launch forward and backward of a block.
        host_seconds_per_step: time of the host outside the passes.
        source: of these numbers.
    """

    name: str
    memory_bytes: float
    peak: float
    product_share: float
    saturation: float
    attention_share: float
    attention_saturation: tuple[float, float]
    memory_bandwidth: float
    traffic_share: float
    host_seconds_per_layer: float
    host_seconds_per_step: float
    source: str


@dataclass(frozen=True)
class Links:
    """The interconnect of devices.

    Attributes:
        within: bytes/s that a device sends within its node.
        between: bytes/s that it sends to other nodes.
        latency: seconds per message.
        source: of these numbers.
    """

    name: str
    within: float
    between: float
    latency: float
    source: str


@dataclass(frozen=True)
class Cluster:
    """The devices of a run."""

    device: Device
    links: Links
    devices: int
    devices_per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.devices_per_node)

    def bus_bandwidth(self, size: int, stride: int) -> float:
        """Bytes/s that each rank sends in a ring collective of `size` ranks that are `stride` ranks apart.

        A collective that leaves its nodes uses one network card for each rank that it has in a node; the other ranks of
        the node, in collectives of the same axis, use the other cards.

        Source: NVIDIA/nccl-tests#119: 96 GB/s in 3 nodes of 8 A100, each node with 4 cards of 25 GB/s. The limit within
        nodes: NVIDIA/nccl#412.
        """
        if size * stride <= self.devices_per_node:
            return self.links.within
        cards = math.gcd(size, max(1, self.devices_per_node // stride))  # of the node with the fewest of these ranks
        return min(self.links.within, cards * self.links.between)

    def link_bandwidth(self, size: int, stride: int) -> float:
        """Bytes/s of a rank's sends and all-to-alls on such an axis, which use the rank's own card only.

        Source: NVIDIA/nccl-tests#267.
        """
        return self.links.within if size * stride <= self.devices_per_node else self.links.between


def _peak(name: str) -> float:
    return peak_flops_per_second(name, is_half_precision=True, given_teraflops=None) or 0.0


def _device(name: str, product: str, gib: float, bandwidth: float, source: str) -> Device:
    """A device with the H100's measured shares."""
    return Device(name, gib * _GIB, _peak(product), *_SHARES, bandwidth, *_TRAFFIC, source)


# Fitted by `benchmarks/gpu/constants.py` to five training steps on one H100 (docs/scaling.md compares them with the
# model); the saturations to six steps at commit 4f3e6bb8.
_SHARES = (0.80, 160.0, 0.55, (1000.0, 22.0))
_TRAFFIC = (0.585, 2.5e-3, 19.7e-3)
_H100 = "NVIDIA H100 80GB HBM3, measured 2026-11-22 and 2026-11-23; peak by NVIDIA's data sheet"
_SHEET = "NVIDIA's data sheet; shares of its peaks as measured on an H100"

DEVICES: Mapping[str, Device] = types.MappingProxyType(
    {
        "h100": _device("h100", "H100", 79.2, 3000.1 * _GIGA, _H100),
        "h200": _device("h200", "H200", 139.0, 4800 * _GIGA * 0.89, _SHEET),
        "a100": _device("a100", "A100", 79.2, 2039 * _GIGA * 0.89, _SHEET),
        "a100-40gb": _device("a100-40gb", "A100", 39.4, 1555 * _GIGA * 0.89, _SHEET),
        "b200": _device("b200", "B200", 178.0, 8000 * _GIGA * 0.89, _SHEET),
    }
)
# Bytes/s in one direction. Each device has its own network card unless noted.
_WITHIN: Mapping[str, tuple[float, str]] = types.MappingProxyType(
    {
        "nvlink3": (300 * _GIGA, "NVLink of the A100, NVIDIA's page on NVLink: 600 GB/s both ways"),
        "nvlink": (450 * _GIGA, "NVLink of the H100, NVIDIA's page on Hopper: 900 GB/s both ways"),
        "nvlink5": (900 * _GIGA, "NVLink of the B200, DGX B200 User Guide: 14.4 TB/s both ways of 8"),
        "pcie4": (32 * _GIGA, "PCI Express 4.0 x16: 64 GB/s both ways"),
        "pcie5": (64 * _GIGA, "PCI Express 5.0 x16: 128 GB/s both ways"),
    }
)
_BETWEEN: Mapping[str, tuple[float, str]] = types.MappingProxyType(
    {
        "ib200": (25 * _GIGA, "InfiniBand HDR, 200 Gb/s a device"),
        "ib400": (50 * _GIGA, "InfiniBand NDR, 400 Gb/s a device"),
        "ib800": (100 * _GIGA, "InfiniBand XDR, 800 Gb/s a device"),
        "roce400": (50 * _GIGA, "Ethernet with RDMA, 400 Gb/s a device"),
        "eth100": (12.5 * _GIGA / 8, "Ethernet, 100 Gb/s a node of 8 devices"),
    }
)
_LATENCY = 10e-6
DEFAULT_INTERCONNECT = "nvlink+ib400"
# NVIDIA's systems with 8 devices and a network card for each. Source: DGX A100, 200 Gb/s: Narayanan
# et al. 2021 (arXiv 2104.04473), section 5; DGX H100, H200 and B200, 400 Gb/s: NVIDIA, "DGX BasePOD", core components.
_DEFAULT_INTERCONNECTS: Mapping[str, str] = types.MappingProxyType(
    {"a100": "nvlink3+ib200", "a100-40gb": "nvlink3+ib200", "b200": "nvlink5+ib400"}
)


def device_of(name: str) -> Device:
    """A device by name, or from a file of constants written by `python -m benchmarks.gpu --constants`.

    Raises:
        ConfigError: the name is unknown, or the file has invalid constants.
    """
    if name.endswith(".json"):
        return _read_device(name)
    found = DEVICES.get(name.lower())
    if found is None:
        raise ConfigError(f"unknown --device {name}. Use one of {', '.join(DEVICES)}, or FILE.json.")
    return found


def _read_device(path: str) -> Device:
    option = f"--device {path}"
    read = read_json(path, option)
    if not isinstance(read, Mapping):
        raise ConfigError(f"{option} contains a {type(read).__name__}. It must be a mapping of constants to values.")
    values: dict[str, Any] = {}
    names = [field.name for field in dataclasses.fields(Device)]
    problems = [
        f"{option}: unknown constant {printable(name)}. Use {', '.join(names)}." for name in read if name not in names
    ]
    for field in dataclasses.fields(Device):
        value: Any = read.get(field.name)
        if field.name in ("name", "source"):
            is_valid, expected = isinstance(value, str), "a string"
        elif field.name == "attention_saturation":
            is_valid = isinstance(value, list) and len(value) == 2 and all(map(_is_positive, value))
            value, expected = tuple(value) if is_valid else value, "two numbers above 0"
        else:
            is_share = field.name.endswith("_share")
            is_valid = _is_positive(value) and (not is_share or value <= 1)
            expected = "a number above 0" + " and at most 1" * is_share
        values[field.name] = value
        if not is_valid:
            shown = "missing" if field.name not in read else printable(value)
            problems.append(f"{option}: {field.name} is {shown}. It must be {expected}.")
    if problems:
        raise ConfigError(problems)
    return Device(**values)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def links_of_device(name: str) -> Links:
    """The default interconnect of a device."""
    return links_of(_DEFAULT_INTERCONNECTS.get(name.lower(), DEFAULT_INTERCONNECT))


def links_of(name: str) -> Links:
    """The interconnect of a description such as `nvlink+ib400`: within nodes, and between them.

    Raises:
        ConfigError: a part of it is unknown.
    """
    within, _, between = name.lower().partition("+")
    if within not in _WITHIN or between not in _BETWEEN:
        raise ConfigError(
            f"unknown --interconnect {name}. Use one of {', '.join(_WITHIN)}, a plus sign, and one of "
            f"{', '.join(_BETWEEN)}, such as {DEFAULT_INTERCONNECT}."
        )
    sources = f"{_WITHIN[within][1]}; {_BETWEEN[between][1]}"
    return Links(name, _WITHIN[within][0], _BETWEEN[between][0], _LATENCY, sources)
