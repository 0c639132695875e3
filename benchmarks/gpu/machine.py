"""The machine of a page: its GPU, driver and versions, and the peak that its datasheet promises."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.kernels.products import can_add_product

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Peak:
    """The peak figures of a datasheet.

    Attributes:
        name: part of the device's name; the first entry that fits counts.
        bf16_teraflops: dense tensor-core rate in 10^12 operations a second, half of the figure "with sparsity".
        terabytes_per_second: bandwidth of the memory.
        source: the datasheet.
    """

    name: str
    bf16_teraflops: float
    terabytes_per_second: float
    source: str


PEAKS = (
    Peak("B200", 2250.0, 8.0, "NVIDIA DGX B200 datasheet, per GPU"),
    Peak("GH200", 989.4, 4.0, "NVIDIA GH200 datasheet, 96 GB HBM3"),
    Peak("H200 NVL", 835.5, 4.8, "NVIDIA H200 datasheet"),
    Peak("H200", 989.4, 4.8, "NVIDIA H200 datasheet, SXM"),
    Peak("H100 NVL", 835.5, 3.9, "NVIDIA H100 datasheet"),
    Peak("H100 PCIe", 756.0, 2.0, "NVIDIA H100 PCIe product brief"),
    Peak("H100", 989.4, 3.35, "NVIDIA H100 datasheet, SXM"),
    Peak("A100-SXM4-80GB", 312.0, 2.039, "NVIDIA A100 datasheet, SXM 80 GB"),
    Peak("A100", 312.0, 1.555, "NVIDIA A100 datasheet, 40 GB"),
    Peak("L40S", 362.05, 0.864, "NVIDIA L40S datasheet"),
    Peak("A10", 125.0, 0.6, "NVIDIA A10 datasheet"),
    Peak("L4", 121.0, 0.3, "NVIDIA L4 datasheet"),
)


def peak_of(device_name: str) -> Peak | None:
    """The peak of a device by its name; None if it is not in the table."""
    return next((peak for peak in PEAKS if peak.name in device_name), None)


def describe(device: torch.device, commit: str | None = None) -> dict[str, object]:
    """The facts about the machine that figures depend on."""
    found: dict[str, object] = {
        "device": device_name(device),
        "processor": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "not known",
        "nvcc": shutil.which("nvcc"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        peak = peak_of(properties.name)
        found["bf16 products add to float32"] = can_add_product(torch.empty(0, device=device), torch.bfloat16)
        found["attention, order of choice"] = [int(each) for each in torch._C._get_sdp_priority_order()]
        found["peak"] = None if peak is None else f"{peak.bf16_teraflops} TFLOP/s in bf16, dense ({peak.source})"
    for package in ("deepspeed", "transformers", "triton"):
        found[package] = _version(package)
    return found


def device_name(device: torch.device) -> str:
    """The GPU's name, or a substitute without a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
