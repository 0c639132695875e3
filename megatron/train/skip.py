"""Data that is consumed without training on it, because it caused a loss spike or made runs fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.config import OptimConfig
from megatron.config.schedule import StepRange, range_to_skip, samples_after

# An entry of `Record.passed_batches`.
PassedBatch = Mapping[str, int]


def skip_data(progress: Progress, optim: OptimConfig, ranges: Sequence[StepRange], sequence_length: int) -> Progress:
    """Progress after skipping a range that starts at the next step; unchanged if there is none."""
    found = range_to_skip(ranges, progress.step)
    if found is None:
        return progress
    first, last = found
    log.info(f"Skipped iterations {first} to {last} due to --skip-train-iteration-range flag.")
    return _passing_over(progress, optim, last - first + 1, sequence_length)


def pass_batches(
    progress: Progress, optim: OptimConfig, steps: Sequence[int], sequence_length: int
) -> tuple[Progress, tuple[PassedBatch, ...]]:
    """Progress after passing over the batches of the next step that made runs fail (`--resume-skip-poisoned`).

    As with a range of `--skip-train-iteration-range`, the step is taken next, on the batch behind them.

    Args:
        steps: the steps before which a batch is passed over; a step may stand there several times.
    """
    passed: list[PassedBatch] = []
    for _ in range(steps.count(progress.step + 1)):
        first = progress.consumed_samples
        progress = _passing_over(progress, optim, 1, sequence_length)
        passed.append({"step": progress.step + 1, "first_sample": first, "last_sample": progress.consumed_samples - 1})
    return progress, tuple(passed)


def _passing_over(progress: Progress, optim: OptimConfig, batches: int, sequence_length: int) -> Progress:
    consumed = samples_after(optim, batches, progress.consumed_samples)
    tokens = (consumed - progress.consumed_samples) * sequence_length
    return dataclasses.replace(progress, consumed_samples=consumed, consumed_tokens=progress.consumed_tokens + tokens)
