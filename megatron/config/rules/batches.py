"""Batch sizes: micro-batches, the global batch and its ramp-up, and data-parallel replicas."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.rules.rule import run_rule, world_rule
from megatron.config.run_sections import RunSections

_MOST_RAMP_UP_STEPS = 1_000_000  # planning the length of a run iterates over them


@run_rule
def _sizes(run: RunSections) -> Iterator[str]:
    micro, batch = run.optim.micro_batch_size, run.optim.global_batch_size
    if micro is None and batch is None:
        yield "--micro-batch-size is required: batch size per model replica and forward pass."
    if batch is not None and micro and batch % micro:
        lower = batch // micro * micro
        yield (
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro}. Use "
            f"{f'{lower} or ' if lower else ''}{lower + micro}."
        )


@run_rule
def _ramp_up(run: RunSections) -> Iterator[str]:
    optim = run.optim
    if optim.rampup_batch_size is None:
        return
    start, increment, samples = optim.rampup_batch_size
    given = f"--rampup-batch-size {start} {increment} {samples}"
    if start <= 0 or increment <= 0 or samples < 0:
        yield f"{given}: start and increment must be positive and samples not negative."
        return
    if samples // start > _MOST_RAMP_UP_STEPS:
        yield (
            f"{given} may take {samples // start} steps. Use at most {start * _MOST_RAMP_UP_STEPS} samples, "
            "or a larger start."
        )
        return
    if optim.global_batch_size is None:
        yield f"{given} requires --global-batch-size, the final size."
    elif start > optim.global_batch_size:
        yield f"{given} starts above --global-batch-size {optim.global_batch_size}. Use a smaller start."
    elif (optim.global_batch_size - start) % increment:
        yield (
            f"{given}: the difference between --global-batch-size {optim.global_batch_size} and {start}, "
            f"{optim.global_batch_size - start}, is not a multiple of the increment {increment}. Use an increment that "
            "divides it."
        )
    if optim.micro_batch_size and (start % optim.micro_batch_size or increment % optim.micro_batch_size):
        yield (
            f"{given}: start and increment must be multiples of --micro-batch-size {optim.micro_batch_size}, so that "
            "each step consists of whole micro-batches."
        )


@world_rule
def _shares(run: RunSections, world_size: int) -> Iterator[str]:
    """Each replica must get whole micro-batches of every global batch."""
    micro, batch, ramp = run.optim.micro_batch_size, run.optim.global_batch_size, run.optim.rampup_batch_size
    if batch is None or any(_sizes(run)) or any(_ramp_up(run)):
        return
    replicas = world_size // run.parallel.replica_size
    if micro is None:
        for size in (batch, *(ramp or ())[:2]):
            if size % replicas:
                yield (
                    f"a global batch of {size} (--global-batch-size, --rampup-batch-size) is not divisible by "
                    f"{replicas} data-parallel replicas. Use a multiple of {replicas}, or another number of processes."
                )
        return
    unit = micro * replicas
    if batch % unit:
        lower = batch // unit * unit
        yield (
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro} x {replicas} data-parallel "
            f"replicas = {unit}. Use {f'{lower} or ' if lower else ''}{lower + unit}."
        )
    if ramp is not None and (ramp[0] % unit or ramp[1] % unit):
        yield (
            f"--rampup-batch-size {ramp[0]} {ramp[1]} {ramp[2]}: start and increment must be multiples of "
            f"--micro-batch-size {micro} x {replicas} data-parallel replicas = {unit}. Use multiples of {unit} or "
            "fewer processes."
        )
