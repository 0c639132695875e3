"""`--skip-train-iteration-range`: skips data, to avoid a range that caused a loss spike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.config import OptimConfig
from megatron.config.schedule import StepRange, range_to_skip, samples_after


def skip_data(progress: Progress, optim: OptimConfig, ranges: Sequence[StepRange], sequence_length: int) -> Progress:
    """Progress after skipping a range that starts at the next step; unchanged if there is none."""
    found = range_to_skip(ranges, progress.step)
    if found is None:
        return progress
    first, last = found
    log.info(f"Skipped iterations {first} to {last} due to --skip-train-iteration-range flag.")
    consumed = samples_after(optim, last - first + 1, progress.consumed_samples)
    tokens = (consumed - progress.consumed_samples) * sequence_length
    return dataclasses.replace(progress, consumed_samples=consumed, consumed_tokens=progress.consumed_tokens + tokens)
