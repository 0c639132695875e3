"""Facts about CUDA devices without importing torch, which takes seconds: possible presence and memory."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import re
import sys
from pathlib import Path

# Device files of NVIDIA's drivers for servers and desktops, for Jetson boards, and for WSL.
_DEVICE_FILES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvmap", "/dev/nvgpu*", "/dev/dxg")


def cuda_unavailable_reason() -> str:
    """The reason why this process certainly has no CUDA device; empty if it may have one, which only torch can tell."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return "DS_ACCELERATOR=cpu"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
    version = _torch_version_file()
    if version is not None and is_cpu_build(version):
        return "PyTorch was installed without CUDA"
    is_rocm = version is None or re.search(r"^hip\b.*= *'", version, re.M) is not None
    if not is_rocm and sys.platform == "linux" and not any(map(glob.glob, _DEVICE_FILES)):
        return "no NVIDIA driver (no files /dev/nvidia*)"
    return ""


def largest_gpu_memory_bytes() -> int | None:
    """The memory of the largest GPU of this machine; None if NVML is missing or fails.

    Nothing is initialized on a GPU.

    Source: NVML API reference, `nvmlDeviceGetMemoryInfo`, whose structure begins with the total.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return None
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        totals = []
        for number in range(count.value):
            device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
            is_open = library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) == 0
            if is_open and library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                totals.append(int(memory[0]))
        library.nvmlShutdown()
    except (OSError, AttributeError):  # no driver, or one without these functions
        return None
    return max(totals, default=None)


def is_cpu_build(version: str) -> bool:
    """True if PyTorch was built without GPU support, according to the text of its `version.py`.

    Source: pytorch `tools/generate_torch_version.py`, which writes `cuda`, `hip` and, since 2.8, `xpu`.
    """
    return all(re.search(rf"^{kind}\b(?:[^=\n]*)= *None$", version, re.M) for kind in ("cuda", "hip"))


def _torch_version_file() -> str | None:
    """The text of the installed `torch/version.py`; None if it cannot be found."""
    spec = importlib.util.find_spec("torch") if "torch" not in sys.modules else sys.modules["torch"].__spec__
    if spec is None or spec.origin is None:
        return None
    try:
        return Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
