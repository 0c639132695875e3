"""A profiler's trace of two steps of ours: which kernels take the time, where the GPU waits, where the host does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.context import Context
from benchmarks.gpu.records import Target
from benchmarks.gpu.runs import request_of, training
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.timing import finish

STEPS, SHOWN_KERNELS = 2, 15
# Calls of the runtime in which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
NO_WAITS = Target(at_most=0.0)
# Classes of kernels by their names; the first that fits counts.
CLASSES = {
    "attention": re.compile(r"sdpa|flash|fmha"),
    "products": re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitK", re.IGNORECASE),
    "torch's": re.compile(r"at::native|at_cuda_detail|cub::"),
    "ours": re.compile(r"megatron::|\(anonymous namespace\)::"),
    "compiled by torch": re.compile(r"^triton_"),
    "copies": re.compile(r"^Mem(cpy|set)"),
}


@dataclass(frozen=True)
class Span:
    """Something that ran, in microseconds."""

    name: str
    began_at: float
    ended_at: float


def measure_trace(context: Context) -> None:
    """Traces two steps of GPT 124M after a warm-up, and writes the trace next to the results."""
    shape = SHAPES["124m"].tiny() if context.is_tiny else SHAPES["124m"]
    length, micro_batch = (16, 2) if context.is_tiny else (1024, 16)
    on_gpu = context.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with training(request_of(context, shape, length, micro_batch)) as (_, step):
        for _ in range(1 if context.is_tiny else 5):
            step()
        finish(context.device)
        with profile(activities=activities) as found:
            for _ in range(STEPS):
                step()
            finish(context.device)
    found.export_chrome_trace(str(context.output / "trace.json.gz"))
    waits = Counter(event.name for event in found.events() if event.name in WAITS)
    _record(context, _kernels(found, on_gpu=on_gpu), waits)


def record_classes(context: Context, step: Callable[[], object], of: Mapping[str, object]) -> None:
    """Profiles two steps, and records the milliseconds a step that kernels of each class and the gaps between take."""
    on_gpu = context.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            step()
        finish(context.device)
    kernels = _kernels(found, on_gpu=on_gpu)
    record = context.recorder.figure
    for name, (microseconds, calls) in by_class(kernels).items():
        record(f"profile, {name}", microseconds / STEPS / 1000, "ms", kernels=calls // STEPS, **of)
    record("profile, gaps", sum(busy_and_gaps(kernels)[1]) / STEPS / 1000, "ms", **of)
    for name, (microseconds, calls) in largest(kernels)[:SHOWN_KERNELS]:
        record("profile, kernel", microseconds / STEPS / 1000, "ms", kernel=name[:90], calls=calls // STEPS, **of)


def by_class(spans: Iterable[Span]) -> dict[str, tuple[float, int]]:
    """The sum of the durations of each class of kernels, with their number, the largest first."""
    return dict(largest(Span(_class_of(span.name), span.began_at, span.ended_at) for span in spans))


def _class_of(name: str) -> str:
    return next((title for title, pattern in CLASSES.items() if pattern.search(name)), "others")


def _kernels(found: profile, *, on_gpu: bool) -> list[Span]:
    """The kernels on the device, or torch's operations without a GPU."""
    device_type = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == device_type and (on_gpu or event.name.startswith("aten::"))
    ]


def _record(context: Context, kernels: Sequence[Span], waits: Counter[str]) -> None:
    record = context.recorder.figure
    if not kernels:
        context.recorder.note("not measured", "the profiler saw no kernel")
        return
    busy, gaps = busy_and_gaps(kernels)
    whole = busy + sum(gaps)
    record("GPU busy, share of the time from first to last kernel", busy / whole, "", steps=STEPS)
    record("gaps between kernels longer than 10 µs", sum(gap > 10 for gap in gaps), "", longest_us=max(gaps, default=0))
    record("kernels per step", len(kernels) / STEPS, "")
    # One wait at the end is that of the measurement itself.
    count = max(0, sum(waits.values()) - 1)
    record("waits of the host per step", count / STEPS, "", target=NO_WAITS, calls=dict(waits))
    for name, (microseconds, calls) in largest(kernels)[:SHOWN_KERNELS]:
        record("kernel, share of the busy time", microseconds / busy, "", of=name[:100], calls=calls // STEPS)


def busy_and_gaps(spans: Iterable[Span]) -> tuple[float, list[float]]:
    """The time covered by at least one span, and the gaps between spans."""
    busy, gaps, ended_at = 0.0, [], None
    for span in sorted(spans, key=lambda span: span.began_at):
        if ended_at is not None and span.began_at > ended_at:
            gaps.append(span.began_at - ended_at)
        began_at = span.began_at if ended_at is None else max(span.began_at, ended_at)
        busy += max(0.0, span.ended_at - began_at)
        ended_at = span.ended_at if ended_at is None else max(ended_at, span.ended_at)
    return busy, gaps


def largest(spans: Iterable[Span]) -> list[tuple[str, tuple[float, int]]]:
    """The sum of the durations of each name, with their number, the largest first."""
    sums: dict[str, tuple[float, int]] = {}
    for span in spans:
        duration, calls = sums.get(span.name, (0.0, 0))
        sums[span.name] = (duration + span.ended_at - span.began_at, calls + 1)
    return sorted(sums.items(), key=lambda pair: -pair[1][0])
