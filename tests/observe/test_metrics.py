"""The record of a step and its mean over an interval."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megatron.checkpoint.record import Progress
from megatron.engine.gradients.gradient_figures import NoiseEstimate
from megatron.objective.distillation import DISTILLATION_LOSS
from megatron.objective.language_model import SAMPLE_LOSS, SOURCE_LOSS, SOURCE_TOKENS, Z_LOSS
from megatron.objective.masked import ORDER_LOSS
from megatron.objective.multi_token import MTP_LOSS
from megatron.observe.metrics import SourceLoss, Waits, mean_of, measure
from tests.train.samples import WORKLOAD, Outcome, metrics


def test_measured_step() -> None:
    step = measure(
        Progress(3, 24, 384), Outcome(skipped=True), WORKLOAD, train_iterations=9, learning_rate=0.1, seconds=0.5
    )
    assert (step.iteration, step.train_iterations, step.consumed_samples, step.consumed_tokens) == (3, 9, 24, 384)
    assert (step.samples_per_second, step.tokens_per_second) == (16.0, 256.0)
    assert step.teraflops_per_device == 16.0 * 2.0 / 4
    assert step.gigaflops_without_embeddings == 6 * 384 * 0.5
    assert (step.skipped_iterations, step.nan_iterations, step.loss_scale) == (1, 0, None)


def test_the_rates_of_shortened_samples_are_those_of_their_tokens() -> None:
    step = measure(
        Progress(3, 24, 384), Outcome(), WORKLOAD.at_length(8), train_iterations=9, learning_rate=0.1, seconds=0.5
    )
    assert (step.samples_per_second, step.tokens_per_second, step.teraflops_per_device) == (16.0, 128.0, 4.0)


def test_a_clock_that_did_not_move_gives_no_rate() -> None:
    step = measure(Progress(1, 8, 128), Outcome(), WORKLOAD, train_iterations=9, learning_rate=0.1, seconds=0.0)
    assert (step.samples_per_second, mean_of([step]).samples_per_second) == (0.0, 0.0)


def test_mean_takes_the_loss_of_the_steps_that_were_not_skipped() -> None:
    steps = [
        metrics(lm_loss=2.0, iteration=1, learning_rate=0.1),
        metrics(lm_loss=100.0, iteration=2, skipped_iterations=1),
        metrics(lm_loss=3.0, iteration=3, learning_rate=0.3, gradient_norm=9.0),
    ]
    mean = mean_of(steps)
    assert mean.lm_loss == 2.5
    assert (mean.iteration, mean.learning_rate, mean.gradient_norm, mean.skipped_iterations) == (3, 0.3, 9.0, 1)


def test_a_step_without_a_counted_token_has_no_loss_and_is_left_out_of_means() -> None:
    names = ("source_a",)
    sums = {SOURCE_LOSS: (0.0,), SOURCE_TOKENS: (0,), Z_LOSS: (0.0,), SAMPLE_LOSS: (0.0, 0.0), ORDER_LOSS: (0.0, 0.0)}
    sums[DISTILLATION_LOSS] = (0.0, 0.0)
    outcome = Outcome(loss=None, token_count=0, gradient_norm=0.0, metrics=sums)
    empty = measure(
        Progress(3, 24, 384), outcome, WORKLOAD, train_iterations=9, learning_rate=0.1, seconds=0.5, source_names=names
    )
    assert (empty.lm_loss, empty.gradient_norm, empty.empty_iterations) == (None, None, 1)
    assert (empty.skipped_iterations, empty.nan_iterations, empty.source_losses) == (0, 0, {})
    assert (empty.z_loss, empty.sample_loss, empty.order_loss, empty.distillation_loss) == (None,) * 4
    mean = mean_of([metrics(lm_loss=2.0, z_loss=0.5), empty, metrics(lm_loss=4.0, z_loss=1.5)])
    assert (mean.lm_loss, mean.z_loss, mean.empty_iterations) == (3.0, 1.0, 1)
    assert mean_of([metrics()]).empty_iterations is None
    assert mean_of([empty, empty]).lm_loss is None


def test_the_distillation_loss_is_divided_by_what_it_is_a_mean_over() -> None:
    outcome = Outcome(token_count=128, metrics={DISTILLATION_LOSS: (6.0, 4.0)})  # of 4 samples of 32 tokens
    step = measure(Progress(3, 24, 384), outcome, WORKLOAD, train_iterations=9, learning_rate=0.1, seconds=0.5)
    assert step.distillation_loss == 1.5


def test_the_loss_of_a_source_is_the_mean_over_its_tokens_in_the_interval() -> None:
    outcomes = [((6.0, 0.0), (2, 0)), ((9.0, 4.0), (1, 4)), ((math.nan, math.nan), (5, 5))]
    steps = [
        measure(
            Progress(number, 8, 128),
            Outcome(metrics={SOURCE_LOSS: losses, SOURCE_TOKENS: tokens}, skipped=number == 3),
            WORKLOAD,
            train_iterations=9,
            learning_rate=0.1,
            seconds=1.0,
            source_names=("web", "books"),
        )
        for number, (losses, tokens) in enumerate(outcomes, start=1)
    ]
    assert steps[0].source_losses == {"web": SourceLoss(3.0, 2)}
    assert mean_of(steps).source_losses == {"web": SourceLoss(5.0, 3), "books": SourceLoss(1.0, 4)}
    assert mean_of([metrics()]).source_losses is None


def test_the_noise_scale_is_the_quotient_of_two_means() -> None:
    """A mean of quotients would be biased, and of a single step either may be below 0."""
    estimates = [NoiseEstimate(12.0, 3.0), NoiseEstimate(6.0, -1.0), NoiseEstimate(-3.0, 1.0), None]
    steps = [
        measure(
            Progress(number, 8, 128), Outcome(noise=noise, zero_gradients=number, gradient_norms={"a": 1.0}), WORKLOAD,
            train_iterations=9, learning_rate=0.1, seconds=1.0,
        )
        for number, noise in enumerate(estimates)
    ]  # fmt: skip
    assert [step.noise_scale for step in steps] == [4.0, None, None, None]
    mean = mean_of(steps)
    assert (mean.gradient_noise, mean.gradient_signal, mean.noise_scale) == (5.0, 1.0, 5.0)
    assert (mean.gradient_zeros, mean.gradient_norms) == (3, {"a": 1.0})


def test_the_z_loss_is_the_mean_over_counted_tokens() -> None:
    outcomes = [Outcome(token_count=4, metrics={Z_LOSS: (total,)}, skipped=total > 5) for total in (1.0, 3.0, 9.0)]
    steps = [
        measure(Progress(1, 8, 128), outcome, WORKLOAD, train_iterations=9, learning_rate=0.1, seconds=1.0)
        for outcome in outcomes
    ]
    assert (steps[0].z_loss, mean_of(steps).z_loss) == (0.25, 0.5)
    assert mean_of([metrics()]).z_loss is None


def test_the_loss_of_a_depth_is_the_mean_over_its_counted_tokens() -> None:
    outcomes = [(6.0, 8.0, 3.0, 2.0), (9.0, 0.0, 3.0, 0.0), (1.0, 1.0, 1.0, 1.0)]
    steps = [
        measure(
            Progress(1, 8, 128),
            Outcome(metrics={MTP_LOSS: sums}, skipped=sums[0] == 1.0),
            WORKLOAD,
            train_iterations=9,
            learning_rate=0.1,
            seconds=1.0,
        )
        for sums in outcomes
    ]
    assert [step.mtp_losses for step in steps[:2]] == [{"mtp_1": 2.0, "mtp_2": 4.0}, {"mtp_1": 3.0}]
    assert mean_of(steps).mtp_losses == {"mtp_1": 2.5, "mtp_2": 4.0}
    assert mean_of([metrics()]).mtp_losses is None


def test_losses_per_sample_are_means_over_samples() -> None:
    outcomes = [Outcome(metrics={SAMPLE_LOSS: pair, ORDER_LOSS: pair}) for pair in ((6.0, 4.0), (9.0, 3.0))]
    steps = [
        measure(Progress(1, 8, 128), outcome, WORKLOAD, train_iterations=9, learning_rate=0.1, seconds=1.0)
        for outcome in outcomes
    ]
    assert (steps[0].sample_loss, mean_of(steps).sample_loss) == (1.5, 2.25)
    assert (steps[0].order_loss, mean_of(steps).order_loss) == (1.5, 2.25)
    assert mean_of([metrics()]).sample_loss is None and mean_of([metrics()]).order_loss is None


def test_what_a_step_waited_for_and_how_well_it_used_the_devices() -> None:
    workload = dataclasses.replace(WORKLOAD, model_flops_per_sample=1e12, peak_flops_per_second=8e12, stages=3)
    waits = [Waits(0.1, 0.2, 0.05, 1000), Waits(0.3, 0.4, 0.15, 3000)]
    steps = [
        measure(
            Progress(1, 8, 128),
            Outcome(),
            workload,
            train_iterations=9,
            learning_rate=0.1,
            seconds=seconds,
            waits=wait,
            eta_seconds=9.0 * seconds,
        )
        for wait, seconds in zip(waits, (1.0, 2.0), strict=True)
    ]
    assert steps[0].model_flops_utilization_ratio == 8 / 4 / 8  # samples a second on 4 devices, of 8 at most
    assert steps[0].bubble_ratio == 2 / (4 + 2)  # 3 stages; 8 samples in micro-batches of 1 on 2 replicas
    mean = mean_of(steps)
    assert mean.data_wait_seconds == pytest.approx(0.2) and mean.communication_seconds == pytest.approx(0.3)
    assert mean.transfer_seconds == pytest.approx(0.1)
    assert mean.model_flops_utilization_ratio == pytest.approx(16 / 3 / 4 / 8)
    assert (mean.memory_bytes, mean.eta_seconds, mean.bubble_ratio) == (3000, 18.0, 2 / 6)
    unknown = mean_of([metrics(), metrics()])
    assert unknown.data_wait_seconds is None and unknown.model_flops_utilization_ratio is None


def test_rates_of_an_interval_are_totals_over_total_time() -> None:
    mean = mean_of(
        [
            metrics(seconds_per_iteration=1.0, samples_per_second=8.0),
            metrics(seconds_per_iteration=3.0, samples_per_second=4.0),
        ]
    )
    assert mean.seconds_per_iteration == 2.0
    assert mean.samples_per_second == (8 + 12) / 4


def test_a_nan_is_shown_and_counted() -> None:
    mean = mean_of([metrics(), metrics(lm_loss=math.nan, nan_iterations=1)])
    assert math.isnan(mean.lm_loss)
    assert mean.nan_iterations == 1


def test_an_infinite_loss_counts_as_nan() -> None:
    step = measure(
        Progress(1, 8, 128), Outcome(loss=math.inf), WORKLOAD, train_iterations=9, learning_rate=0.1, seconds=1.0
    )
    assert step.nan_iterations == 1


def test_an_interval_of_skipped_steps_shows_their_finite_losses() -> None:
    skipped = [metrics(lm_loss=loss, skipped_iterations=1) for loss in (2.0, math.nan, 4.0)]
    assert mean_of([metrics(lm_loss=7.0), *skipped]).lm_loss == 7.0
    assert mean_of(skipped).lm_loss == 3.0
    assert math.isnan(mean_of(skipped[1:2]).lm_loss)
