"""The metrics of a step and their mean over an interval."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.objective.metric import Metric, MetricSpec, Reduction, StepMetrics, metrics_of
from megatron.observe.metrics import mean_of, measure
from tests.train.samples import WORKLOAD, Outcome, metrics


def step(
    outcome: Any = None, workload: Any = WORKLOAD, *others: Metric, seconds: float = 0.5, **more: Any
) -> StepMetrics:
    """The metrics of step 3."""
    outcome = Outcome() if outcome is None else outcome
    known = {"train_iterations": 9, "learning_rate": 0.1, "seconds": seconds, **more}
    return measure(Progress(3, 24, 384), outcome, workload, others, **known)


def values(metrics: StepMetrics, *names: str) -> list[Any]:
    return [metrics.value(name) for name in names]


def test_the_rates_of_shortened_samples_are_those_of_their_tokens() -> None:
    rates = values(step(None, WORKLOAD.at_length(8)), "samples_per_second", "tokens_per_second", "teraflops_per_device")
    assert rates == [16.0, 128.0, 4.0]


def test_a_clock_that_did_not_move_gives_no_rate() -> None:
    still = step(seconds=0.0)
    assert [each.value("samples_per_second") for each in (still, mean_of([still]))] == [0.0, 0.0]


def test_a_step_without_a_counted_token_has_no_loss_and_is_left_out_of_means() -> None:
    empty = step(Outcome(loss=None, gradient_norm=0.0, metrics=StepMetrics(z_loss=Metric("z_loss", 0.0, 0.0))))
    names = ("lm_loss", "gradient_norm", "empty_iterations", "skipped_iterations", "nan_iterations", "z_loss")
    assert values(empty, *names) == [None, None, 1, 0, 0, None]
    mean = mean_of([metrics(lm_loss=2.0, z_loss=0.5), empty, metrics(lm_loss=4.0, z_loss=1.5)])
    assert values(mean, "lm_loss", "z_loss", "empty_iterations") == [3.0, 1.0, 1]
    assert mean_of([metrics()]).value("empty_iterations") is None
    assert mean_of([empty, empty]).value("lm_loss") is None


@pytest.mark.parametrize(("reduction", "mean"), [(Reduction.MEAN, 4.0), (Reduction.WEIGHTED_MEAN, 11.0 / 3)])
def test_a_mean_is_over_applied_steps_and_weighted_if_asked(reduction: Reduction, mean: float) -> None:
    steps = []
    for losses, is_skipped in (((6.0, 0.0, 2.0, 0.0), False), ((5.0, 4.0, 1.0, 4.0), False), ((9.0,) * 4, True)):
        outcome = Outcome(skipped=is_skipped)
        outcome.metrics.add(*MetricSpec(("web", "books"), reduction).metrics("losses", losses))
        steps.append(step(outcome))
    assert values(steps[0], "losses/web", "losses/books") == [3.0, None]
    assert values(mean_of(steps), "losses/web", "losses/books") == [mean, 1.0]
    assert mean_of([metrics()]).value("losses/web") is None


def test_the_noise_scale_is_the_quotient_of_two_means() -> None:
    """A mean of quotients would be biased, and of a single step either may be below 0."""
    steps = []
    for noise, signal in ((12.0, 3.0), (6.0, -1.0), (-3.0, 1.0)):
        steps.append(step(None, WORKLOAD, Metric("gradient_noise", noise), Metric("gradient_signal", signal)))
    steps.append(step())
    assert [each.value("noise_scale") for each in steps] == [4.0, None, None, None]
    names = ("gradient_noise", "gradient_signal", "noise_scale")
    assert values(mean_of(steps), *names) == [5.0, 1.0, 5.0]
    assert values(mean_of([steps[0], steps[2], steps[2], steps[2], steps[2]]), *names) == [0.0, 1.4, None]
    steps[0].add(Metric("skipped_iterations", 1, reduction=Reduction.TOTAL))
    assert mean_of([steps[0]]).value("noise_scale") is None


def test_what_a_step_waited_for_and_how_well_it_used_the_devices() -> None:
    workload = dataclasses.replace(WORKLOAD, model_flops_per_sample=1e12, peak_flops_per_second=8e12, stages=3)
    steps = [
        step(
            None,
            workload,
            *metrics_of({"data_wait_seconds": wait}, Reduction.RATE),
            *metrics_of({"memory_bytes": memory, "transfer_seconds": None}, Reduction.LAST),
            seconds=seconds,
            eta_seconds=9.0 * seconds,
        )
        for wait, memory, seconds in ((0.125, 1000, 1.0), (0.375, 3000, 2.0))
    ]
    assert steps[0].value("model_flops_utilization_ratio") == 8 / 4 / 8  # samples a second on 4 devices, of 8 at most
    assert steps[0].value("bubble_ratio") == 2 / (4 + 2)  # 3 stages; 8 samples in micro-batches of 1 on 2 replicas
    mean = mean_of(steps)
    assert mean.value("model_flops_utilization_ratio") == pytest.approx(16 / 3 / 4 / 8)
    names = ("data_wait_seconds", "memory_bytes", "eta_seconds", "bubble_ratio", "transfer_seconds")
    assert values(mean, *names) == [0.25, 3000, 18.0, 2 / 6, None]


def test_rates_of_an_interval_are_totals_over_total_time() -> None:
    mean = mean_of([step(seconds=1.0), step(Outcome(sample_count=12, skipped=True), seconds=3.0)])
    assert values(mean, "seconds_per_iteration", "samples_per_second") == [2.0, 20 / 4]


def test_an_interval_of_skipped_steps_shows_their_finite_losses() -> None:
    skipped = [metrics(lm_loss=loss, skipped_iterations=1) for loss in (2.0, math.nan, 4.0)]
    assert mean_of([metrics(lm_loss=7.0), *skipped]).value("lm_loss") == 7.0
    assert mean_of(skipped).value("lm_loss") == 3.0
    assert math.isnan(mean_of(skipped[1:2]).value("lm_loss"))


def test_an_infinite_loss_counts_as_nan() -> None:
    assert step(Outcome(loss=math.inf)).value("nan_iterations") == 1
