"""Learning rate, batch sizes, and the number of steps and samples of a run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import EvaluationConfig, SafetyRequest
from megatron.config.resolve import resolve_optim
from megatron.config.schedule import (
    LearningRateSchedule,
    global_batch_size,
    is_done,
    learning_rate,
    planned_iterations,
    planned_samples,
    ramp_up_batches,
    range_to_skip,
    ranges_at_the_end,
    samples_after,
    samples_before_step,
    samples_per_epoch,
    schedule,
    skipped_steps,
    step_segments,
    weight_decay,
)
from megatron.config.sections.optim import OptimRequest
from tests.train.samples import optim_config

# 10 steps of 8 samples; warm-up 2 steps = 16 samples, decay over 80. Computed by hand.
LINEAR = {0: 0.0, 8: 0.5, 16: 1.0, 24: 1 - 8 / 64 * 0.9, 48: 0.55, 80: 0.1, 81: 0.1, 800: 0.1}
COSINE = {0: 0.0, 8: 0.5, 16: 1.0, 32: 0.1 + 0.9 * (0.5 + math.sqrt(0.125)), 48: 0.55, 80: 0.1, 88: 0.1}
CONSTANT = {0: 0.0, 8: 0.5, 16: 1.0, 17: 1.0, 80: 1.0, 8000: 1.0}


@pytest.mark.parametrize(("style", "golden"), [("linear", LINEAR), ("cosine", COSINE), ("constant", CONSTANT)])
def test_rates_computed_by_hand(style: str, golden: dict[int, float]) -> None:
    optim = optim_config(train_iters=10, lr_warmup_iters=2, min_lr=0.1, lr_decay_style=style)
    for samples, rate in golden.items():
        assert learning_rate(optim, samples) == pytest.approx(rate, abs=1e-15), samples


# 16 samples of warm-up from 0.5, decay over 80, the last 32 of it the annealing of WSD.
@pytest.mark.parametrize(
    ("flags", "golden"),
    [
        ({"lr_decay_style": "inverse-square-root"}, {16: 1.0, 64: 0.5, 80: math.sqrt(0.2), 81: 0.1}),
        (
            {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 0},
            {0: 1.0, 1: 1.0, 16: 0.25, 80: 0.1 + 0.0118034},
        ),
        ({"lr_decay_style": "exponential"}, {16: 1.0, 48: math.sqrt(0.5), 80: 0.5, 81: 0.5, 800: 0.5}),
        ({"lr_wsd_decay_style": "linear"}, {8: 0.75, 16: 1.0, 48: 1.0, 64: 0.55, 80: 0.1, 88: 0.1}),
        ({"lr_wsd_decay_style": "cosine"}, {48: 1.0, 64: 0.55, 72: 0.1 + 0.45 * (1 - math.sqrt(0.5))}),
        ({"lr_wsd_decay_style": "exponential"}, {48: 1.0, 64: 0.1 + 0.9 * (math.sqrt(2) - 1), 80: 0.1}),
        ({"lr_wsd_decay_style": "minus_sqrt"}, {48: 1.0, 56: 0.55, 80: 0.1}),
    ],
)
def test_rates_of_other_styles_by_hand(flags: dict[str, Any], golden: dict[int, float]) -> None:
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4} if "lr_wsd_decay_style" in flags else {}
    known = {"train_iters": 10, "lr_warmup_iters": 2, "min_lr": 0.1, "lr_warmup_init": 0.5}
    optim = optim_config(**{**known, **wsd, **flags})
    for samples, rate in golden.items():
        assert learning_rate(optim, samples) == pytest.approx(rate, abs=1e-6), samples


def test_the_decay_of_wsd_in_samples() -> None:
    changes = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "lr_wsd_decay_samples": 20, "min_lr": 0.0}
    optim = optim_config(train_iters=None, train_samples=100, **changes)
    assert [learning_rate(optim, samples) for samples in (80, 90, 100)] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("flags", "warmup", "decay"),
    [
        ({"train_iters": 10}, 0, 80),
        ({"train_iters": 10, "lr_decay_iters": 5, "lr_warmup_iters": 1}, 8, 40),
        ({"train_iters": 500000, "lr_decay_iters": 320000, "lr_warmup_fraction": 0.01}, 25600.0, 2560000),
        ({"train_samples": 300, "lr_warmup_samples": 5}, 5, 300),
        ({"train_samples": 300, "lr_decay_samples": 6, "lr_warmup_samples": 5}, 5, 6),
        ({"train_samples": 300, "lr_warmup_fraction": 0.5}, 150.0, 300),
    ],
)
def test_schedule_is_counted_in_samples(flags: dict[str, float], warmup: float, decay: float) -> None:
    course = schedule(optim_config(**flags))
    assert (course.warmup_samples, course.decay_samples) == (pytest.approx(warmup), decay)


@given(
    length=st.sampled_from(["train_iters", "train_samples", "train_tokens", "steps and tokens"]),
    size=st.integers(0, 20),
    ranges=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), max_size=3),
    ramp=st.sampled_from([None, (2, 2, 30)]),
)
def test_no_run_uses_more_data_than_is_planned(
    length: str, size: int, ranges: list[tuple[int, int]], ramp: tuple[int, int, int] | None
) -> None:
    """Whatever is skipped; with --train-iters every step is taken."""
    texts = tuple(f"{first}-{first + more}" for first, more in ranges)
    skipped = SafetyRequest(skip_train_iteration_range=texts).skip_ranges
    lengths = {
        "train_iters": {"train_iters": size},
        "train_samples": {"train_samples": size * 7 + 8, "rampup_batch_size": ramp},
        "train_tokens": {"train_tokens": size * 200 + 1, "rampup_batch_size": ramp},
        "steps and tokens": {"train_tokens": size * 200 + 1, "train_iters": 9, "most_iters": 9},
    }
    optim = optim_config(**TOKENS, **lengths[length])
    planned = planned_samples(optim, EvaluationConfig(), ranges=skipped)[0]
    step = consumed = 0
    not_passed = dict(ranges_at_the_end(optim, skipped))
    while not is_done(optim, step, consumed, skipped):
        found = range_to_skip(skipped, step)
        assert found not in not_passed
        consumed = samples_after(optim, found[1] - found[0] + 1 if found else 0, consumed)
        consumed, step = consumed + global_batch_size(optim, consumed), step + 1
        assert consumed <= planned
        if optim.train_samples is not None:
            assert consumed <= optim.train_samples
    if length == "train_iters":
        assert step == size
    for (first, _), is_reached in not_passed.items():
        assert is_reached == (first - 1 == step and not is_done(optim, step, consumed)), (first, step)


# --rampup-batch-size 2 2 60 towards 8: three increments, each after 20 samples.
RAMP = {0: 2, 18: 2, 20: 4, 39: 4, 40: 6, 59: 6, 60: 8, 61: 8, 1000: 8}


@pytest.mark.parametrize(("samples", "size"), RAMP.items())
def test_ramp_up_computed_by_hand(samples: int, size: int) -> None:
    assert global_batch_size(optim_config(rampup_batch_size=(2, 2, 60), train_samples=300), samples) == size


def upstream_iterations(start: int, increment: int, ramp: int, full: int, samples: int) -> int:
    """Upstream's count: the ramp-up step by step to its end, then the rest by division."""
    consumed = count = 0
    while consumed <= ramp:
        share = ramp / ((full - start) // increment)
        consumed += full if consumed > ramp else start + int(consumed / share) * increment
        count += 1
    return count + (samples - consumed) // full


@given(
    start=st.integers(1, 6),
    increment=st.integers(1, 5),
    increments=st.integers(1, 6),
    ramp=st.integers(1, 400),
    more=st.integers(0, 500),
)
def test_iterations_agree_with_upstream_and_with_the_loop(
    start: int, increment: int, increments: int, ramp: int, more: int
) -> None:
    full, samples = start + increment * increments, ramp + more
    optim = optim_config(
        micro_batch_size=1, global_batch_size=full, rampup_batch_size=(start, increment, ramp), train_samples=samples
    )
    step, consumed, seen = 0, 0, []
    while not is_done(optim, step, consumed):
        assert consumed == samples_after(optim, step)
        seen.append(planned_iterations(optim, step, consumed))
        step, consumed = step + 1, consumed + global_batch_size(optim, consumed)
    assert step == upstream_iterations(start, increment, ramp, full, samples)
    assert consumed <= samples
    assert set(seen) <= {step}


def test_planned_samples() -> None:
    evaluation = EvaluationConfig(eval_interval=4, eval_iters=3)
    assert planned_samples(optim_config(train_iters=10), evaluation) == (80, 3 * 8, 3 * 8)
    assert planned_samples(optim_config(train_samples=83), evaluation) == (83, 3 * 8, 3 * 8)
    assert planned_samples(optim_config(train_iters=10), EvaluationConfig(eval_iters=0)) == (80, 0, 0)
    whole = EvaluationConfig(full_validation=True)
    assert planned_samples(optim_config(train_iters=10), whole) == (80, None, None)
    assert planned_samples(optim_config(train_iters=10), dataclasses.replace(whole, eval_iters=0)) == (80, 0, 0)


def test_samples_of_an_epoch() -> None:
    optim = optim_config(train_tokens=3 * 50 * 16, tokens_per_sample=16)
    assert samples_per_epoch(3, optim) == 50
    assert samples_per_epoch(None, optim) is None
    assert samples_per_epoch(3, optim_config(train_iters=10)) is None


def test_the_ramp_up_is_traversed_once() -> None:
    optim = optim_config(rampup_batch_size=(2, 2, 12), train_samples=100)
    assert list(ramp_up_batches(optim, 0)) == [2, 2, 4, 6] and list(ramp_up_batches(optim, 9)) == [6]
    assert list(ramp_up_batches(optim, 15)) == [] == list(ramp_up_batches(optim_config(train_iters=1), 0))
    assert [samples_after(optim, steps) for steps in range(7)] == [0, 2, 4, 8, 14, 22, 30]
    assert samples_after(optim, 2, 8) == 22


def test_past_ranges_are_not_counted() -> None:
    ranges = ((3, 5), (10, 11))
    assert [skipped_steps(ranges, after=step) for step in (0, 2, 3, 9, 10)] == [5, 5, 2, 2, 0]
    assert skipped_steps((), after=0) == 0


def test_a_range_is_skipped_before_its_first_step() -> None:
    ranges = ((1, 1), (3, 5), (6, 8))
    assert [range_to_skip(ranges, step) for step in range(6)] == [(1, 1), None, (3, 5), None, None, (6, 8)]


def test_skipped_data_is_planned() -> None:
    ranges, nothing = ((3, 5), (8, 8)), EvaluationConfig(eval_iters=0)
    assert planned_samples(optim_config(train_iters=10), nothing, ranges=ranges)[0] == 14 * 8
    assert planned_samples(optim_config(train_samples=80), nothing, ranges=ranges)[0] == 80
    tokens = optim_config(**TOKENS, train_tokens=80 * 32)
    assert planned_samples(tokens, nothing, ranges=ranges)[0] == 80
    assert planned_samples(optim_config(train_iters=10), nothing, 3, 48, ranges=ranges)[0] == 48 + 7 * 8 + 8


@given(
    ranges=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3)), max_size=3),
    ramp=st.integers(0, 60),
    last=st.integers(1, 14),
)
def test_samples_before_a_step_agree_with_step_by_step_counting(
    ranges: list[tuple[int, int]], ramp: int, last: int
) -> None:
    texts = tuple(f"{first}-{first + more}" for first, more in ranges)
    skipped = SafetyRequest(skip_train_iteration_range=texts).skip_ranges
    optim = optim_config(rampup_batch_size=(2, 2, ramp), train_samples=1000)
    consumed = 0
    for step in range(1, last + 1):
        found = range_to_skip(skipped, step - 1)
        for _ in range(found[1] - found[0] + 1 if found else 0):
            consumed += global_batch_size(optim, consumed)
        assert samples_before_step(optim, skipped, step) == consumed
        consumed += global_batch_size(optim, consumed)


TOKENS = {"tokens_per_sample": 32}  # what resolve takes from --seq-length


@given(
    style=st.sampled_from(["constant", "linear", "cosine"]),
    ramp=st.sampled_from([None, (2, 2, 60), (4, 4, 9)]),
    train=st.integers(20, 60),
    decay=st.one_of(st.none(), st.integers(15, 80)),
    warmup=st.integers(0, 14),
    ranges=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3)), max_size=2),
)
def test_tokens_give_the_same_run_as_samples(
    style: str,
    ramp: tuple[int, int, int] | None,
    train: int,
    decay: int | None,
    warmup: int,
    ranges: list[tuple[int, int]],
) -> None:
    same = {"lr_decay_style": style, "rampup_batch_size": ramp, "min_lr": 0.1}
    counted = optim_config(**same, train_samples=10_000, lr_decay_samples=(decay or train) * 8,
                           lr_warmup_samples=warmup * 8)  # fmt: skip
    texts = tuple(f"{first}-{first + more}" for first, more in ranges)
    skipped = SafetyRequest(skip_train_iteration_range=texts).skip_ranges
    end = samples_after(counted, train)  # a whole number of steps, whatever the batch sizes
    counted = dataclasses.replace(counted, train_samples=end)
    tokens = optim_config(
        **same, **TOKENS, train_tokens=end * 32, lr_decay_tokens=counted.lr_decay_samples * 32,
        lr_warmup_tokens=warmup * 8 * 32,
    )  # fmt: skip
    assert planned_iterations(tokens) == planned_iterations(counted) == train
    nothing = EvaluationConfig(eval_iters=0)
    assert planned_samples(tokens, nothing, ranges=skipped) == planned_samples(counted, nothing, ranges=skipped)
    consumed = step = 0
    while not is_done(counted, step, consumed):
        assert not is_done(tokens, step, consumed)
        assert learning_rate(tokens, consumed) == learning_rate(counted, consumed)
        assert planned_iterations(tokens, step, consumed) == train
        consumed, step = consumed + global_batch_size(tokens, consumed), step + 1
    assert is_done(tokens, step, consumed) and step == train


def test_the_last_step_reaches_the_tokens() -> None:
    optim = optim_config(**TOKENS, train_tokens=3 * 8 * 32 + 1)
    assert planned_iterations(optim) == 4 and planned_samples(optim, EvaluationConfig(eval_iters=0))[0] == 32
    assert [is_done(optim, step, step * 8) for step in range(2, 6)] == [False, False, True, True]
    ramp = optim_config(**TOKENS, rampup_batch_size=(2, 2, 12), train_tokens=9 * 32)  # 2 2 4 6
    assert planned_iterations(ramp) == 4 and is_done(ramp, 4, 14) and not is_done(ramp, 3, 8)


def test_samples_and_tokens_end_a_run_at_whichever_comes_first() -> None:
    by_tokens = optim_config(**TOKENS, train_tokens=10 * 32, train_samples=1000)
    assert planned_iterations(by_tokens) == 2 and planned_samples(by_tokens, EvaluationConfig())[0] == 1000
    by_samples = optim_config(**TOKENS, train_tokens=1000 * 32, train_samples=20)
    assert planned_iterations(by_samples) == 2 and is_done(by_samples, 2, 16)


def test_steps_and_tokens_end_a_run_at_whichever_comes_first() -> None:
    request = OptimRequest(micro_batch_size=2, global_batch_size=8, train_iters=10, train_tokens=640, lr=1.0)
    optim = resolve_optim(request, 8, 32)  # 20 samples, 8 a step
    assert (optim.train_iters, optim.most_iters) == (3, 10)
    assert [is_done(optim, step, step * 8) for step in range(5)] == [False, False, False, True, True]
    assert planned_samples(optim, EvaluationConfig(eval_iters=0))[0] == 80  # as upstream plans its data
    assert schedule(optim) == LearningRateSchedule(0, 80)
    short = resolve_optim(dataclasses.replace(request, train_iters=2), 8, 32)
    assert (short.train_iters, planned_iterations(short, 1, 8)) == (2, 2) and is_done(short, 2, 16)
    assert resolve_optim(optim, 8, 32) == optim


def test_a_change_of_batch_size_does_not_move_the_last_token() -> None:
    optim = optim_config(**TOKENS, global_batch_size=16, train_tokens=105 * 32)
    assert planned_iterations(optim, 1, 8) == 8  # 8 + 7 x 16 = 120
    assert not is_done(optim, 7, 104) and is_done(optim, 8, 120)


def test_tokens_that_are_no_whole_samples_are_not_rounded() -> None:
    optim = optim_config(**TOKENS, train_samples=80, lr_decay_tokens=1000, lr_warmup_tokens=100)
    assert schedule(optim) == LearningRateSchedule(100 / 32, 1000 / 32)
    assert learning_rate(optim, 2) == pytest.approx(2 * 32 / 100)
    assert learning_rate(optim, 8) == pytest.approx(1 - (8 * 32 - 100) / (1000 - 100))
    assert learning_rate(optim, 32) == 0.0


def test_a_schedule_in_tokens_goes_with_a_length_in_steps() -> None:
    optim = optim_config(**TOKENS, train_iters=10, lr_decay_tokens=5 * 8 * 32, lr_warmup_iters=1)
    assert schedule(optim) == LearningRateSchedule(8, 40)
    assert schedule(optim_config(**TOKENS, train_tokens=640, lr_warmup_fraction=0.5)) == LearningRateSchedule(10, 20)


@pytest.mark.parametrize(
    ("style", "decays"),
    [("linear", [0.1, 0.15, 0.2, 0.25, 0.3, 0.3]), ("cosine", [0.1, 0.1293, 0.2, 0.2707, 0.3, 0.3])],
)
@pytest.mark.parametrize(
    "length", [{"train_iters": 4}, {"train_samples": 32}, {**TOKENS, "train_tokens": 32 * 32}], ids=str
)
def test_weight_decay_rises_over_the_run(style: str, decays: list[float], length: dict[str, int]) -> None:
    optim = optim_config(
        **length, weight_decay_incr_style=style, start_weight_decay=0.1, end_weight_decay=0.3, weight_decay=7.0
    )
    assert [weight_decay(optim, 8 * step) for step in range(6)] == pytest.approx(decays, abs=1e-4)
    assert weight_decay(optim_config(weight_decay=7.0), 8) == 7.0


@given(
    steps=st.integers(1, 30),
    tokens=st.integers(1, 4000),
    limit=st.none() | st.integers(1, 60),
    ramp=st.none() | st.tuples(st.just(2), st.sampled_from([2, 6]), st.integers(0, 40)),
)
def test_a_curriculum_is_planned_by_the_tokens_that_it_takes(
    steps: int, tokens: int, limit: int | None, ramp: tuple[int, int, int] | None
) -> None:
    optim = optim_config(
        **TOKENS, train_tokens=tokens, most_iters=limit, train_samples=None if limit else 10**6, rampup_batch_size=ramp,
        curriculum_learning=True, curriculum_min_length=8, curriculum_steps=steps, lr_decay_tokens=2000,
    )  # fmt: skip
    planned = planned_iterations(optim)
    step, samples, used = 0, 0, 0
    lengths = [(size, length) for many, size, length in step_segments(optim) for _ in range(min(many or 99, 99))]
    while not is_done(optim, step, samples, (), used):
        assert planned_iterations(optim, step, samples, used) == planned
        size = global_batch_size(optim, samples)
        assert lengths[step] == (size, optim.length_of_step(step + 1))
        assert learning_rate(optim, samples, used) == pytest.approx(max(0.0, 1.0 - used / 2000))
        used += size * optim.length_of_step(step + 1)
        step, samples = step + 1, samples + size
    assert step == planned
    if not limit:
        assert used >= tokens
        assert planned_samples(optim, EvaluationConfig())[0] == 10**6


def test_a_warm_up_in_samples_before_a_decay_in_tokens() -> None:
    """The warm-up ends after 20 samples: 8 of 16 tokens, 8 of 24 and 4 of 32."""
    course = {"lr_warmup_samples": 20, "lr_decay_tokens": 888, "train_samples": 1000}
    growth = {"curriculum_learning": True, "curriculum_min_length": 8, "curriculum_steps": 3}
    optim = optim_config(**TOKENS, **course, **growth)
    assert [optim.length_of_step(step) for step in (1, 2, 3, 4)] == [16, 24, 32, 32]
    warm = 8 * 16 + 8 * 24 + 4 * 32
    assert learning_rate(optim, 16, 320) == 16 / 20
    assert learning_rate(optim, 24, 576) == pytest.approx(1 - (576 - warm) / (888 - warm))
    turned = optim_config(**TOKENS, **growth, lr_warmup_tokens=warm, lr_decay_samples=100, train_samples=1000)
    assert learning_rate(turned, 16, 320) == 320 / warm
    assert learning_rate(turned, 24, 576) == pytest.approx(1 - (24 - 20) / (100 - 20))
    late = dataclasses.replace(optim, lr_warmup_samples=64)  # within the last stretch, which has no end
    assert learning_rate(late, 72, 2112) == 0.0


def test_data_passed_over_counts_with_the_length_of_the_next_step() -> None:
    growth = {"curriculum_learning": True, "curriculum_min_length": 8, "curriculum_steps": 3}
    optim = optim_config(**TOKENS, **growth, train_tokens=500)
    assert not is_done(optim, 1, 8, ((2, 2),), 128) and is_done(optim, 1, 8, ((2, 3),), 128)


def test_a_weight_decay_by_tokens() -> None:
    course = {"start_weight_decay": 0.0, "end_weight_decay": 1.0, "weight_decay_incr_style": "linear"}
    optim = optim_config(**TOKENS, **course, train_tokens=3200)
    assert weight_decay(optim, 50) == 0.5 and weight_decay(optim, 50, 800) == 0.25
