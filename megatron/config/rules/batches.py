"""Batch sizes: micro-batches, the global batch and its ramp-up, and the replicas that share them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.rules.rule import run_rule, world_rule
from megatron.config.run_sections import RunSections

_MOST_RAMP_UP_STEPS = 1_000_000  # each is counted where the length of a run is planned


@run_rule
def _sizes(run: RunSections) -> Iterator[str]:
    micro, batch = run.optim.micro_batch_size, run.optim.global_batch_size
    if micro is None and batch is None:
        yield "--micro-batch-size is required: samples per forward pass of one model replica."
    if batch is not None and micro and batch % micro:
        lower = batch // micro * micro
        yield (
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro}. "
            f"Use {f'{lower} or ' if lower else ''}{lower + micro}."
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
            f"{given} could take {samples // start} steps. Give at most {start * _MOST_RAMP_UP_STEPS} samples, "
            "or a larger start."
        )
        return
    if optim.global_batch_size is None:
        yield f"{given} needs --global-batch-size, the size the batch grows to."
    elif start > optim.global_batch_size:
        yield f"{given} starts above --global-batch-size {optim.global_batch_size}. Start at or below it."
    elif (optim.global_batch_size - start) % increment:
        yield (
            f"{given}: from {start} to --global-batch-size {optim.global_batch_size} is "
            f"{optim.global_batch_size - start}, which is not a multiple of the increment {increment}. Use an "
            "increment that divides it."
        )
    if optim.micro_batch_size and (start % optim.micro_batch_size or increment % optim.micro_batch_size):
        yield (
            f"{given}: start and increment must be multiples of --micro-batch-size {optim.micro_batch_size}, or "
            "some step could not be split into micro-batches."
        )


@world_rule
def _shares(run: RunSections, world_size: int) -> Iterator[str]:
    """Each replica gets whole micro-batches of every global batch, unless the sizes contradict each other already."""
    micro, batch, ramp = run.optim.micro_batch_size, run.optim.global_batch_size, run.optim.rampup_batch_size
    if batch is None or any(_sizes(run)) or any(_ramp_up(run)):
        return
    replicas = world_size // run.parallel.replica_size
    if micro is None:
        for size in (batch, *(ramp or ())[:2]):
            if size % replicas:
                yield (
                    f"a global batch of {size} (--global-batch-size, --rampup-batch-size) cannot be shared by "
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
