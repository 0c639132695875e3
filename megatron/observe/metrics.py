"""The metrics of a training step, and their mean over a log interval.

Source: TFLOPs formula and definition of the values in the log line: bigscience-workshop/Megatron-DeepSpeed,
megatron/training.py (`training_log`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from megatron.checkpoint.record import Progress
from megatron.engine.totals import StepResult
from megatron.objective.metric import Metric, Reduction, StepMetrics, combined, metrics_of
from megatron.observe.speed import Workload


class TaskOutcome(Protocol):
    """The result of a task of --eval-tasks; equal on all ranks."""

    @property
    def name(self) -> str: ...

    @property
    def count(self) -> int:
        """Number of items."""

    @property
    def figures(self) -> Mapping[str, float]:
        """Values by metric."""

    @property
    def errors(self) -> Mapping[str, float]:
        """Standard errors by metric, where available."""


def measure(
    progress: Progress,
    outcome: StepResult,
    workload: Workload,
    others: Iterable[Metric] = (),
    *,
    train_iterations: int,
    learning_rate: float,
    seconds: float,
    loss_scale: float | None = None,
    eta_seconds: float | None = None,
) -> StepMetrics:
    """The metrics of one step.

    Args:
        progress: after the step.
        outcome: the result of the engine.
        workload: converts samples to tokens and FLOPs.
        others: additional metrics of the step.
        train_iterations: planned steps of the run.
        seconds: wall time of the step.
        loss_scale: in fp16.
        eta_seconds: estimated time to the end of the run.
    """
    samples, is_empty = outcome.sample_count, outcome.loss is None
    rates = {
        "samples_per_second": float(samples),
        "tokens_per_second": float(samples * workload.tokens_per_sample),
        "teraflops_per_device": samples * workload.flops_per_sample / workload.device_count / 1e12,
        "model_flops_utilization_ratio": workload.utilization_ratio(samples),
    }
    counts = {
        "skipped_iterations": int(outcome.skipped or outcome.consecutive_bad > 0),
        "nan_iterations": int(_is_not_finite(outcome)),
        "empty_iterations": 1 if is_empty else None,
    }
    latest = {
        "iteration": progress.step,
        "train_iterations": train_iterations,
        "consumed_samples": progress.consumed_samples,
        "consumed_tokens": progress.consumed_tokens,
        "learning_rate": learning_rate,
        "global_batch_size": samples,
        "loss_scale": loss_scale,
        "gradient_norm": None if is_empty else outcome.gradient_norm,
        "gigaflops_without_embeddings": workload.gigaflops_without_embeddings(progress.consumed_tokens),
        "bubble_ratio": workload.bubble_ratio(samples),
        "eta_seconds": eta_seconds,
    }
    metrics = StepMetrics(outcome.metrics)
    metrics.add(Metric("seconds_per_iteration", seconds, reduction=Reduction.RATE))
    metrics.add(*metrics_of({"lm_loss": outcome.loss}, Reduction.MEAN))
    metrics.add(*metrics_of(rates, Reduction.RATE, seconds or math.inf))
    metrics.add(*metrics_of(counts, Reduction.TOTAL), *metrics_of(latest, Reduction.LAST), *others)
    return _with_noise_scale(metrics)


def mean_of(steps: Sequence[StepMetrics]) -> StepMetrics:
    """Combines the metrics of consecutive steps for the log line, each by its reduction.

    The loss is the mean over the steps that were not skipped, so that a single NaN makes it NaN; if all were skipped,
    as while fp16 searches for a loss scale, the mean of the finite losses. Steps without a counted token have none.
    """
    applied = [step for step in steps if not step.value("skipped_iterations")]
    counted = {Reduction.MEAN: applied, Reduction.WEIGHTED_MEAN: applied, Reduction.LAST: steps[-1:]}
    mean = StepMetrics()
    for name, metric in {name: metric for step in steps for name, metric in step.items()}.items():
        parts = [step[name] for step in counted.get(metric.reduction, steps) if name in step]
        if parts:
            mean[name] = combined(parts)
    if not applied:
        values = [step.value("lm_loss") for step in steps]
        losses = [value for value in values if value is not None and math.isfinite(value)]
        mean["lm_loss"] = Metric("lm_loss", sum(losses) / len(losses) if losses else math.nan)
    return _with_noise_scale(mean)


def _with_noise_scale(metrics: StepMetrics) -> StepMetrics:
    """Adds the gradient noise scale: the batch size at which the noise of a gradient equals its signal."""
    noise, signal = metrics.value("gradient_noise"), metrics.value("gradient_signal")
    if noise is not None and signal is not None:
        metrics.add(Metric("noise_scale", noise / signal if noise > 0.0 and signal > 0.0 else None))
    return metrics


def _is_not_finite(outcome: StepResult) -> bool:
    is_loss_finite = outcome.loss is None or math.isfinite(outcome.loss)
    return not is_loss_finite or (outcome.consecutive_bad > 0 and not outcome.is_spike)
