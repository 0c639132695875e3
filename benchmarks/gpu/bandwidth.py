"""Bandwidth of every compiled operation relative to a copy, and its time relative to eager and compiled torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.records import Target
from benchmarks.gpu.timing import forget_memory, seconds_per_call
from benchmarks.operations import CASES, Case, Size, cases
from megatron.kernels.choice import Implementation
from megatron.kernels.native.library import library

# bf16 values of 256 MiB; the last one is odd in everything.
SIZES = (Size(65536, 2048), Size(16384, 8192), Size(60001, 2237))
FIRST = ("norm", "rotary", "softmax", "multi_tensor")  # what earlier runs had no time for
SHARE_OF_COPY = Target(at_least=0.85)


def measure_operations(context: Context) -> None:
    """The forward pass, and the backward pass as the difference of both passes and forward."""
    copied = measured_copy(context)
    found = library()
    if found is None:
        context.recorder.note("not measured", "no library of compiled operations is built for this machine")
        return
    ends_at = time.monotonic() + context.seconds
    for operation in sorted(CASES, key=lambda name: name not in FIRST):
        if not found.has(operation, context.device):
            context.recorder.note("not measured", "the library has no code for this device", of=operation)
            continue
        ratios: list[float] = []
        for size in (Size(8, 64),) if context.is_tiny else SIZES:
            for case in cases(operation, size, torch.bfloat16, context.device):
                if time.monotonic() > ends_at:
                    context.recorder.note("not measured", "out of time", of=operation, case=case.label)
                    continue
                try:
                    ratios += _measure(context, case, copied)
                except (RuntimeError, torch.OutOfMemoryError) as failure:
                    context.recorder.note("failed", str(failure)[:300], of=operation, case=case.label)
            forget_memory(context.device)
        if ratios:  # what megatron/kernels/native/measured.py holds
            mean = statistics.geometric_mean(ratios)
            context.recorder.figure("geometric mean, torch eager in times of ours", mean, "", of=operation)


def measured_copy(context: Context) -> float:
    """Bytes per second, read and written, of copies of 1 GiB."""
    count = 2**12 if context.is_tiny else 2**30
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    seconds = seconds_per_call(lambda: target.copy_(source), context.device, repeats=_repeats(context))
    rate = 2 * count / seconds
    context.recorder.figure("copy, read and written", rate / 1e9, "GB/s", of="torch copy_", bytes=count)
    return rate


def _measure(context: Context, case: Case, copied: float) -> list[float]:
    """Records the figures of a case; returns torch's times in times of ours."""
    of = {"of": case.operation, "case": case.label}

    def seconds(call: Callable[[], object]) -> float:
        return seconds_per_call(call, context.device, repeats=_repeats(context))

    ours = seconds(lambda: case.forward(Implementation.CSRC))
    context.recorder.figure(
        "forward, share of the copy's bandwidth", case.forward_bytes / ours / copied, "", target=SHARE_OF_COPY, **of
    )
    context.recorder.figure("forward", ours * 1e6, "µs", bytes=case.forward_bytes, **of)
    eager = seconds(lambda: case.forward(Implementation.TORCH))
    context.recorder.figure("forward, torch eager in times of ours", eager / ours, "", **of)
    ratios = [eager / ours]
    if case.inputs:
        both = seconds(lambda: case.both(Implementation.CSRC))
        backward = both - ours
        if backward > 0:
            share = case.backward_bytes / backward / copied
            context.recorder.figure("backward, share of the copy's bandwidth", share, "", target=SHARE_OF_COPY, **of)
        eager_both = seconds(lambda: case.both(Implementation.TORCH))
        context.recorder.figure("both passes, torch eager in times of ours", eager_both / both, "", **of)
        ratios.append(eager_both / both)
    if context.is_tiny:
        return ratios
    compiled = torch.compile(lambda: case.compute(Implementation.TORCH))
    try:
        with torch.no_grad():
            theirs = seconds(compiled)
        context.recorder.figure("forward, torch.compile in times of ours", theirs / ours, "", **of)
    except Exception as failure:  # a compiler of another project may fail in any way
        context.recorder.note("torch.compile failed", f"{type(failure).__name__}: {str(failure)[:200]}", **of)
    finally:
        torch.compiler.reset()
    return ratios


def _repeats(context: Context) -> int:
    return 2 if context.is_tiny else 30
