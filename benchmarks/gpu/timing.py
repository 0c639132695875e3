"""Times of calls, on the device's own clock."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

_FLUSHED_BYTES = 256 * 2**20  # more than the second-level cache of any GPU


def seconds_per_call(call: Callable[[], object], device: torch.device, *, repeats: int, warm_ups: int = 3) -> float:
    """The median over single calls, with a cold cache on a GPU."""
    for _ in range(warm_ups):
        call()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            began_at = time.perf_counter()
            call()
            times.append(time.perf_counter() - began_at)
        return statistics.median(times)
    flushed = torch.empty(_FLUSHED_BYTES // 4, dtype=torch.int32, device=device)
    events = []
    for _ in range(repeats):
        flushed.zero_()
        pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        pair[0].record()
        call()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize(device)
    return statistics.median(first.elapsed_time(second) / 1000 for first, second in events)


def seconds_of_steps(step: Callable[[], object], device: torch.device, steps: int) -> float:
    """Wall time of consecutive steps, per step, until the device has finished the last."""
    finish(device)
    began_at = time.perf_counter()
    for _ in range(steps):
        step()
    finish(device)
    return (time.perf_counter() - began_at) / steps


def finish(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_memory(device: torch.device) -> None:
    """Frees what nothing refers to, and begins to count the peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most memory that tensors took since `forget_memory`; 0 where there is no GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
