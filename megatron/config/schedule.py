"""Schedules of a run: learning rate, weight decay, batch sizes, and the number of steps and samples.

All functions are pure functions of the configuration and of consumed samples, so a resumed run needs no scheduler
state. Omitted consumed tokens are samples x sequence length; they are fewer with a curriculum. Two differences from
upstream are intentional: a step skipped after an overflow consumes its samples and so advances the schedule, and the
reported learning rate is the one that was applied (upstream prints that of the next step).

Source: bigscience-workshop/Megatron-DeepSpeed, megatron/microbatches.py, megatron/learning_rates.py and
megatron/training.py; the inverse square root: deepspeedai's, megatron/optimizer_param_scheduler.py; the exponential:
GPT-NeoX, megatron/learning_rates.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.config.sections.evaluation import EvaluationConfig
from megatron.config.sections.optim import OptimConfig, OptimRequest

# Decay functions: fraction of the decay -> remaining fraction of the range from minimum to peak rate.
_DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1.0),
}
# Annealing functions of WSD. Source: NVIDIA's Megatron-LM, `megatron/core/optimizer_param_scheduler.py`.
_ANNEALINGS: Mapping[str, Callable[[float], float]] = {
    **_DECAYS,
    "exponential": lambda ratio: 2.0 * 0.5**ratio - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}

StepRange = tuple[int, int]


@dataclass(frozen=True)
class LearningRateSchedule:
    """Warmup and decay of the learning rate in samples.

    A length in tokens is divided by the tokens per sample without rounding, so that rates match those that upstream
    computes from consumed tokens.

    Attributes:
        warmup_samples: samples over which the rate rises to its peak; possibly fractional.
        decay_samples: samples after which the rate has reached its minimum.
    """

    warmup_samples: float
    decay_samples: float


def schedule(optim: OptimConfig) -> LearningRateSchedule:
    """Converts warmup and decay of the learning rate to samples."""
    in_samples = optim.is_counted_in_samples
    per_step = optim.global_batch_size
    decay: float
    if optim.lr_decay_tokens is not None:
        decay = optim.lr_decay_tokens / optim.tokens_per_sample
    elif not in_samples:
        decay = (optim.lr_decay_iters or optim.given_iters or 0) * per_step
    else:
        tokens = optim.train_tokens or 0
        decay = optim.lr_decay_samples or optim.train_samples or tokens / optim.tokens_per_sample
    warmup: float = optim.lr_warmup_samples if in_samples else optim.lr_warmup_iters * per_step
    if optim.lr_warmup_tokens is not None:
        warmup = optim.lr_warmup_tokens / optim.tokens_per_sample
    elif optim.lr_warmup_fraction is not None:
        warmup = optim.lr_warmup_fraction * decay
    return LearningRateSchedule(warmup, decay)


def learning_rate(optim: OptimConfig, consumed_samples: int, consumed_tokens: int | None = None) -> float:
    """Learning rate of the step that starts after this many consumed samples and tokens.

    The first step of a run with warmup has the rate --lr-warmup-init, by default 0, as upstream. Parts of the schedule
    given in tokens use consumed tokens, the others consumed samples.
    """
    course = schedule(optim)
    peak, floor = optim.lr, optim.min_lr
    full_samples: float = consumed_samples  # consumed tokens in samples of full length
    if optim.curriculum_learning and consumed_tokens is not None:
        full_samples = consumed_tokens / optim.tokens_per_sample
    warming = full_samples if optim.warms_up_in_tokens else consumed_samples
    if course.warmup_samples > 0 and warming <= course.warmup_samples:
        return optim.lr_warmup_init + (peak - optim.lr_warmup_init) * warming / course.warmup_samples
    if optim.lr_decay_style == "constant":
        return peak
    decaying = full_samples if optim.decays_in_tokens else consumed_samples
    if decaying > course.decay_samples:
        return max(floor, peak / 2) if optim.lr_decay_style == "exponential" else floor
    warmup = _warmup_of_decay(optim, course)
    ratio = (decaying - warmup) / (course.decay_samples - warmup)
    if optim.lr_decay_style == "inverse-square-root":
        return max(floor, peak * math.sqrt(max(warmup, 1.0) / max(decaying, 1.0)))
    if optim.lr_decay_style == "exponential":
        return max(floor, peak * 0.5**ratio)
    if optim.lr_decay_style == "WSD":
        length = annealing_samples(optim)
        start = course.decay_samples - length
        share = 1.0 if decaying <= start else _ANNEALINGS[optim.lr_wsd_decay_style]((decaying - start) / length)
        return floor + share * (peak - floor)
    return floor + _DECAYS[optim.lr_decay_style](ratio) * (peak - floor)


def annealing_samples(optim: OptimConfig) -> int:
    """Samples of the annealing phase of WSD; 0 with another style."""
    return (optim.lr_wsd_decay_iters or 0) * optim.global_batch_size or optim.lr_wsd_decay_samples or 0


def _warmup_of_decay(optim: OptimConfig, course: LearningRateSchedule) -> float:
    """The warmup in the unit of the decay, which differs with a curriculum if only one of them is in tokens."""
    if not optim.curriculum_learning or optim.warms_up_in_tokens == optim.decays_in_tokens:
        return course.warmup_samples
    samples, tokens = 0.0, 0.0
    for steps, size, length in step_segments(optim):
        share = length / optim.tokens_per_sample
        passed = course.warmup_samples - samples
        if optim.warms_up_in_tokens:
            passed = (course.warmup_samples - tokens) / share
        if steps is not None:
            passed = min(passed, steps * size)
        samples, tokens = samples + passed, tokens + passed * share
        if steps is None or passed < steps * size:
            break
    return tokens if optim.decays_in_tokens else samples


def weight_decay(optim: OptimConfig, consumed_samples: int, consumed_tokens: int | None = None) -> float:
    """Weight decay of the step that starts after this many consumed samples and tokens.

    Source: deepspeedai's Megatron-DeepSpeed `megatron/optimizer_param_scheduler.py`, `get_wd`.
    """
    start, end = optim.start_weight_decay, optim.end_weight_decay
    if optim.weight_decay_incr_style == "constant" or start is None or end is None:
        return optim.weight_decay
    length: float = (optim.given_iters or 0) * optim.global_batch_size
    if optim.is_counted_in_samples:
        length = optim.train_samples or (optim.train_tokens or 0) / optim.tokens_per_sample
    consumed: float = consumed_samples
    if optim.is_counted_in_samples and optim.train_samples is None and consumed_tokens is not None:
        consumed = consumed_tokens / optim.tokens_per_sample
    ratio = min(1.0, consumed / length) if length > 0 else 1.0
    if optim.weight_decay_incr_style == "cosine":
        ratio = 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
    return start + ratio * (end - start)


def batch_sizes(optim: OptimRequest, replicas: int) -> tuple[int, int]:
    """The micro-batch and global batch sizes; the former defaults to a replica's share of the global batch."""
    micro, batch = optim.micro_batch_size, optim.global_batch_size
    if batch is None:
        return micro or 1, (micro or 1) * replicas
    return micro or max(1, math.gcd(batch, *(optim.rampup_batch_size or ())[:2]) // replicas), batch


def global_batch_size(optim: OptimConfig, consumed_samples: int) -> int:
    """Global batch size of the step that starts after this many consumed samples.

    With --rampup-batch-size START INCREMENT SAMPLES the size grows from START by INCREMENT at equal intervals within
    SAMPLES. The floating-point division is upstream's, so the sizes agree step by step.
    """
    full = optim.global_batch_size
    if optim.rampup_batch_size is None:
        return full
    start, increment, ramp_samples = optim.rampup_batch_size
    increments = (full - start) // increment
    if consumed_samples > ramp_samples or increments == 0 or ramp_samples == 0:
        return full
    return min(full, start + int(consumed_samples / (ramp_samples / increments)) * increment)


def ramp_up_batches(optim: OptimConfig, consumed_samples: int) -> Iterator[int]:
    """Global batch sizes of the remaining steps in the batch-size ramp-up, from this many consumed samples on."""
    if optim.rampup_batch_size is None:
        return
    while consumed_samples <= optim.rampup_batch_size[2]:
        size = global_batch_size(optim, consumed_samples)
        yield size
        consumed_samples += size


def samples_after(optim: OptimConfig, steps: int, consumed_samples: int = 0) -> int:
    """Consumed samples after this many more steps."""
    for size in ramp_up_batches(optim, consumed_samples):
        if steps == 0:
            return consumed_samples
        consumed_samples += size
        steps -= 1
    return consumed_samples + steps * optim.global_batch_size


def step_segments(
    optim: OptimConfig, step: int = 0, consumed_samples: int = 0
) -> Iterator[tuple[int | None, int, int]]:
    """Yields (steps, batch size, sequence length) for consecutive steps of equal sizes; the last has `steps` None."""
    for size in ramp_up_batches(optim, consumed_samples):
        step += 1
        yield 1, size, optim.length_of_step(step)
    while (last := optim.last_step_of_length(step + 1)) is not None:
        yield last - step, optim.global_batch_size, optim.length_of_step(step + 1)
        step = last
    yield None, optim.global_batch_size, optim.length_of_step(step + 1)


def is_done(
    optim: OptimConfig,
    step: int,
    consumed_samples: int,
    ranges: Sequence[StepRange] = (),
    consumed_tokens: int | None = None,
) -> bool:
    """Returns True if the planned steps, samples or tokens are consumed.

    A batch that would exceed --train-samples is not started; the last step may exceed --train-tokens. Data that one of
    `ranges` skips before the next step counts as consumed.

    Source: deepspeedai's Megatron-DeepSpeed `megatron/training.py`, `train`, for tokens.
    """
    tokens = consumed_samples * optim.tokens_per_sample if consumed_tokens is None else consumed_tokens
    skipped = range_to_skip(ranges, step)
    if skipped is not None and optim.is_limited_by_data:
        before, consumed_samples = consumed_samples, samples_after(optim, skipped[1] - skipped[0] + 1, consumed_samples)
        tokens += (consumed_samples - before) * optim.length_of_step(step + 1)
    if optim.train_tokens is not None and tokens >= optim.train_tokens:
        return True
    if not optim.is_counted_in_samples:
        return step >= (optim.given_iters or 0)
    following = consumed_samples + global_batch_size(optim, consumed_samples)
    return optim.train_samples is not None and following > optim.train_samples


def planned_iterations(
    optim: OptimConfig, step: int = 0, consumed_samples: int = 0, consumed_tokens: int | None = None
) -> int:
    """Total steps of training: completed steps plus those that the remaining samples or tokens allow.

    Source: bigscience Megatron-DeepSpeed `megatron/training.py`, `update_train_iters`; there, a run that ends within
    the ramp-up exceeds --train-samples.
    """
    if optim.train_tokens is None and optim.train_samples is None:
        return optim.train_iters
    tokens = consumed_samples * optim.tokens_per_sample if consumed_tokens is None else consumed_tokens
    left = [0]
    for steps, size, length in step_segments(optim, step, consumed_samples):
        left = [] if optim.most_iters is None else [optim.most_iters - step]
        if optim.train_samples is not None:
            left.append((optim.train_samples - consumed_samples) // size)
        if optim.train_tokens is not None:
            left.append(-((tokens - optim.train_tokens) // (size * length)))
        if steps is None or min(left) < steps:
            break
        step, consumed_samples, tokens = step + steps, consumed_samples + steps * size, tokens + steps * size * length
    return step + max(0, min(left))


def samples_per_epoch(epochs: int | None, optim: OptimConfig) -> int | None:
    """Training samples of one epoch of --epochs; None without --epochs."""
    if epochs is None or optim.train_tokens is None:
        return None
    return optim.train_tokens // optim.tokens_per_sample // epochs


def planned_samples(
    optim: OptimConfig,
    evaluation: EvaluationConfig,
    step: int = 0,
    consumed_samples: int = 0,
    consumed_tokens: int | None = None,
    *,
    ranges: Sequence[StepRange] = (),
) -> tuple[int, int | None, int | None]:
    """Samples of training, validation and test over the whole run; index files are built for them.

    None for validation and test stands for all data once (--full-validation). Every evaluation uses the same first
    samples, so those of one evaluation suffice (upstream continues through its validation data). With --train-iters,
    skipped data is added; --train-samples and --train-tokens include it.

    Args:
        optim: the resolved optimizer section.
        evaluation: the evaluation section, for the number of batches.
        step: completed steps at the resume; likewise consumed_samples and consumed_tokens.
        ranges: the steps to skip.
    """
    batch = optim.global_batch_size
    if optim.train_samples is not None:
        train = optim.train_samples
    else:
        last = optim.given_iters or planned_iterations(optim, step, consumed_samples, consumed_tokens)
        steps = last - step
        train = samples_after(optim, max(0, steps), consumed_samples)
    if not optim.is_counted_in_samples:
        train += skipped_steps(ranges, after=step) * batch
    evaluated = None if evaluation.full_validation and evaluation.eval_iters else evaluation.eval_iters * batch
    return train, evaluated, evaluated


def skipped_steps(ranges: Sequence[StepRange], after: int) -> int:
    """Global batches that `ranges` (1-based, inclusive) skip after `after` completed steps.

    Step numbers have no gap: step A then trains on the data of step B + 1. Unlike upstream's, a range skips whole
    global batches and advances the consumed samples, so a later resume is correct.
    """
    return sum(last - first + 1 for first, last in ranges if first > after)


def range_to_skip(ranges: Sequence[StepRange], step: int) -> StepRange | None:
    """The range of data to skip before the next step, after `step` completed steps."""
    return next((pair for pair in ranges if pair[0] == step + 1), None)


def ranges_at_the_end(optim: OptimConfig, ranges: Sequence[StepRange]) -> Iterator[tuple[StepRange, bool]]:
    """Yields the ranges that a run from the start does not skip, and True for one that leaves no data.

    The run ends before such a range.
    """
    for index, pair in enumerate(ranges):
        step = pair[0] - 1
        consumed = samples_after(optim, step + skipped_steps(ranges[:index], after=0))
        if is_done(optim, step, consumed, [pair]):
            yield pair, not is_done(optim, step, consumed)


def samples_before_step(optim: OptimConfig, ranges: Sequence[StepRange], step: int) -> int:
    """Samples consumed before step number `step`, counted from 1, including skipped data."""
    skipped = skipped_steps(ranges, after=0) - skipped_steps(ranges, after=step)
    return samples_after(optim, step - 1 + skipped)
