"""How far a run is, and what follows from it: learning rate, batch size, micro-batches and the end of training.

Everything here is a pure function of the configuration and of what was consumed, so a resumed run needs no scheduler
state. Two things differ from upstream on purpose: a step that is skipped because of an overflow consumed its samples
and so advances the schedule, and the rate that is reported is the one that was applied (upstream prints the next
step's).

Source: bigscience-workshop/Megatron-DeepSpeed, megatron/microbatches.py, megatron/learning_rates.py and
megatron/training.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.checkpoint.record import Progress
from megatron.config import ControlConfig, OptimConfig
from megatron.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """The learning rate's course, counted in samples.

    Attributes:
        warmup_samples: samples over which the rate rises from 0 to its peak; not always whole (a fraction of the
            decay).
        decay_samples: samples after which the rate has reached its floor.
    """

    warmup_samples: float
    decay_samples: float


def learning_rate(optim: OptimConfig, consumed_samples: int) -> float:
    """Learning rate of the step that starts after so many consumed samples.

    The first step of a run with warm-up therefore runs at rate 0, as upstream's does.

    Raises:
        ConfigError: the warm-up is longer than the decay.
    """
    course = schedule(optim)
    peak, floor = optim.lr or 0.0, optim.min_lr
    if course.warmup_samples > 0 and consumed_samples <= course.warmup_samples:
        return peak * consumed_samples / course.warmup_samples
    if optim.lr_decay_style == "constant":
        return peak
    if consumed_samples > course.decay_samples:
        return floor
    ratio = (consumed_samples - course.warmup_samples) / (course.decay_samples - course.warmup_samples)
    remaining = 1.0 - ratio if optim.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
    return floor + remaining * (peak - floor)


def schedule(optim: OptimConfig) -> Schedule:
    """Warm-up and decay of the learning rate in samples, whatever unit they were given in.

    Raises:
        ConfigError: the warm-up does not end before the decay does.
    """
    batch = _full_batch(optim)
    warmup: float
    if optim.train_samples is None:
        decay = (optim.lr_decay_iters or optim.train_iters or 0) * batch
        warmup = optim.lr_warmup_iters * batch
    else:
        decay = optim.lr_decay_samples or optim.train_samples
        warmup = optim.lr_warmup_samples
    if optim.lr_warmup_fraction is not None:
        warmup = optim.lr_warmup_fraction * decay
    if not 0 <= warmup < decay:
        raise ConfigError(
            f"The learning rate would warm up over {warmup:g} samples but decay over only {decay:g} (--train-iters "
            f"{optim.train_iters}, --train-samples {optim.train_samples}, --global-batch-size {batch}). The warm-up "
            "must end before the decay does: lower --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples, or "
            "raise --lr-decay-iters or --lr-decay-samples."
        )
    return Schedule(warmup, decay)


def global_batch_size(optim: OptimConfig, consumed_samples: int) -> int:
    """Samples of the step that starts after so many consumed samples.

    With --rampup-batch-size START INCREMENT SAMPLES the size grows from START by INCREMENT in equal shares of SAMPLES.
    The division is upstream's floating-point one, so the sizes agree step by step.
    """
    full = _full_batch(optim)
    if optim.rampup_batch_size is None:
        return full
    start, increment, ramp_samples = optim.rampup_batch_size
    increments = (full - start) // increment
    if consumed_samples > ramp_samples or increments == 0 or ramp_samples == 0:
        return full
    return min(full, start + int(consumed_samples / (ramp_samples / increments)) * increment)


def micro_batches(optim: OptimConfig, consumed_samples: int, data_parallel_size: int) -> int:
    """Micro-batches per replica of the step that starts after so many consumed samples.

    Raises:
        ConfigError: the step's global batch does not split evenly.
    """
    size = global_batch_size(optim, consumed_samples)
    together = optim.micro_batch_size * data_parallel_size
    if size % together:
        raise ConfigError(
            f"A global batch of {size} samples (after {consumed_samples} consumed; --global-batch-size "
            f"{optim.global_batch_size}, --rampup-batch-size {optim.rampup_batch_size}) does not split into "
            f"micro-batches of {optim.micro_batch_size} on {data_parallel_size} replicas. Every size must be a "
            f"multiple of {together}: change --micro-batch-size, the sizes or the number of processes."
        )
    return size // together


def is_done(optim: OptimConfig, progress: Progress) -> bool:
    """Whether the planned iterations or samples are used up; a batch that would exceed the samples is not started."""
    if optim.train_samples is not None:
        after_next = progress.consumed_samples + global_batch_size(optim, progress.consumed_samples)
        return after_next > optim.train_samples
    return progress.step >= (optim.train_iters or 0)


def planned_iterations(optim: OptimConfig, progress: Progress | None = None) -> int:
    """Iterations at the end of training: those already done plus those that the rest takes.

    Upstream's rule where that one makes sense. Where a ramp-up is longer than the whole run, upstream's count is off;
    this one stops before the first batch that would exceed --train-samples.
    """
    progress = progress or Progress()
    if optim.train_samples is None:
        return optim.train_iters or 0
    step, consumed = progress.step, progress.consumed_samples
    ramp_samples = optim.rampup_batch_size[2] if optim.rampup_batch_size else -1
    while consumed <= ramp_samples and consumed + global_batch_size(optim, consumed) <= optim.train_samples:
        consumed += global_batch_size(optim, consumed)
        step += 1
    if consumed <= ramp_samples:
        return step
    return step + max(0, optim.train_samples - consumed) // _full_batch(optim)


def planned_samples(
    optim: OptimConfig, control: ControlConfig, progress: Progress | None = None
) -> tuple[int, int, int]:
    """Samples that training, validation and test want over the whole run; what the index files are built for.

    Every evaluation sees the same first samples, so it needs those of one evaluation only (upstream walks on through
    its validation data and plans for all of them).

    Args:
        optim: the resolved optimizer section.
        control: intervals and lengths of evaluation.
        progress: where the run resumes, so that a changed batch size still gives enough samples.
    """
    progress = progress or Progress()
    batch = _full_batch(optim)
    iterations = planned_iterations(optim, progress)
    if optim.train_samples is not None:
        train = optim.train_samples
    else:
        train = progress.consumed_samples + max(0, iterations - progress.step) * batch
    return train, control.eval_iters * batch, control.eval_iters * batch


def _full_batch(optim: OptimConfig) -> int:
    """The global batch after any ramp-up; `resolve` has set it."""
    return optim.global_batch_size or optim.micro_batch_size
