"""The metrics record of a training step, and the mean of such records over a log interval.

Source: TFLOPs formula and definition of the values in the log line: bigscience-workshop/Megatron-DeepSpeed,
megatron/training.py (`training_log`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.checkpoint.record import Progress
from megatron.engine.totals import StepResult
from megatron.objective.distillation import DISTILLATION_LOSS
from megatron.objective.language_model import SAMPLE_LOSS, SOURCE_LOSS, SOURCE_TOKENS, Z_LOSS
from megatron.objective.masked import ORDER_LOSS
from megatron.objective.multi_token import MTP_LOSS
from megatron.observe.routing import RoutingFigures, mean_routing, routing_figures
from megatron.observe.speed import Workload


class TaskOutcome(Protocol):
    """What was measured in a task of --eval-tasks; equal on all ranks."""

    @property
    def name(self) -> str:
        """The task's name."""

    @property
    def count(self) -> int:
        """Number of items."""

    @property
    def figures(self) -> Mapping[str, float]:
        """A value by metric."""

    @property
    def errors(self) -> Mapping[str, float]:
        """The standard errors of the figures that have one."""


@dataclass(frozen=True)
class SourceLoss:
    """The loss on the tokens of one data source.

    Attributes:
        lm_loss: mean loss per token in nats.
        tokens: number of counted tokens.
    """

    lm_loss: float
    tokens: int


@dataclass(frozen=True)
class Waits:
    """What a step waited for, and the memory it took, on one process; None where that was not measured.

    Attributes:
        data_seconds: how long the step waited until its batch was read.
        communication_seconds: how long the messages to and from other ranks took, waiting for these ranks included:
            the collectives of tensor-parallel layers and of the loss, and all that DeepSpeed sends. On a GPU this is
            the time on the stream that waits for the message; what DeepSpeed sends during the computation then counts
            although nothing waits for it.
        transfer_seconds: of these, what stages of a pipeline send to each other and wait for from each other.
        memory_bytes: the most memory the process has held so far.
    """

    data_seconds: float | None = None
    communication_seconds: float | None = None
    transfer_seconds: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one training step, or their mean over several.

    Attributes:
        iteration: the last step covered.
        train_iterations: planned steps of the run.
        consumed_samples: training samples consumed after that step.
        consumed_tokens: training tokens consumed after that step.
        seconds_per_iteration: wall time of a step, evaluation and saving excluded.
        learning_rate: learning rate of the last step.
        global_batch_size: global batch size of the last step.
        lm_loss: mean loss per counted token in nats over the steps that were not skipped, NaN if there were none; None
            if no token of these steps counts.
        loss_scale: the loss scale in fp16; None otherwise.
        gradient_norm: gradient norm of the last step before clipping; None if unknown, or if no token of it counts.
        weight_norm: L2 norm of all weights after the last step; None unless measured in it.
        weight_norms: the same of each layer, by its global name.
        gradient_norms: the norm of the gradient of each layer before clipping; None unless measured.
        gradient_zeros: elements of the gradient that are 0; None unless counted.
        gradient_noise: estimate of the trace of the covariance of the gradient of a sample, over the same steps as
            `lm_loss`; None unless measured.
        gradient_signal: the same of the squared norm of the gradient of all data.
        noise_scale: their quotient, in samples; None where it says nothing because one of them is not above 0.
        skipped_iterations: number of covered steps whose update was skipped.
        nan_iterations: number of covered steps whose loss or, outside fp16, gradient norm was NaN or infinite.
        samples_per_second: over all replicas.
        tokens_per_second: over all replicas.
        teraflops_per_device: TFLOPs per second and device.
        gigaflops_without_embeddings: GFLOPs of the run so far, without embeddings.
        source_losses: by source name, for sources with counted tokens; None unless requested.
        empty_iterations: number of covered steps of which no token counts, so that they changed no weight and have no
            losses; None if there were none.
        z_loss: mean z-loss per token, its coefficient included, over the same steps as `lm_loss`; None without z-loss.
        sample_loss: mean over samples of their mean losses per token, over the same steps as `lm_loss`; None unless
            that is what is minimized.
        distillation_loss: mean divergence from a teacher, its weight included, over the same steps as `lm_loss`: per
            token, or per sample if that is what is minimized; None without a teacher.
        mtp_losses: mean loss per counted token of each depth of multi-token prediction, over the same steps as
            `lm_loss`, as `mtp_1` and so on; None without it.
        order_loss: mean sentence-order loss per sample, over the same steps as `lm_loss`; None without such a head.
        routing: what the routers did, over the same steps; None without experts.
        model_flops_utilization_ratio: see `Workload.utilization_ratio`; None where the peak of the device is unknown.
        data_wait_seconds: how long a step waited for its batch, on the process that records.
        communication_seconds: how long a step's messages took there, see `Waits`; None if that was not measured.
        transfer_seconds: of these, those between pipeline stages; None without a pipeline.
        bubble_ratio: the idle share of an ideal pipeline, see `Workload.bubble_ratio`; None without one.
        memory_bytes: the most memory that process has held, see `device.peak_memory_bytes`.
        eta_seconds: estimated time to the end of the run, evaluations and saves included; None at first.
    """

    iteration: int
    train_iterations: int
    consumed_samples: int
    consumed_tokens: int
    seconds_per_iteration: float
    learning_rate: float
    global_batch_size: int
    lm_loss: float | None
    loss_scale: float | None
    gradient_norm: float | None
    skipped_iterations: int
    nan_iterations: int
    samples_per_second: float
    tokens_per_second: float
    teraflops_per_device: float
    gigaflops_without_embeddings: float
    weight_norm: float | None = None
    weight_norms: Mapping[str, float] | None = None
    gradient_norms: Mapping[str, float] | None = None
    gradient_zeros: int | None = None
    gradient_noise: float | None = None
    gradient_signal: float | None = None
    noise_scale: float | None = None
    source_losses: Mapping[str, SourceLoss] | None = None
    empty_iterations: int | None = None
    z_loss: float | None = None
    sample_loss: float | None = None
    order_loss: float | None = None
    distillation_loss: float | None = None
    mtp_losses: Mapping[str, float] | None = None
    routing: RoutingFigures | None = None
    model_flops_utilization_ratio: float | None = None
    data_wait_seconds: float | None = None
    communication_seconds: float | None = None
    transfer_seconds: float | None = None
    bubble_ratio: float | None = None
    memory_bytes: int | None = None
    eta_seconds: float | None = None


def measure(
    progress: Progress,
    outcome: StepResult,
    workload: Workload,
    *,
    train_iterations: int,
    learning_rate: float,
    seconds: float,
    loss_scale: float | None = None,
    source_names: Sequence[str] = (),
    waits: Waits | None = None,
    eta_seconds: float | None = None,
) -> StepMetrics:
    """Builds the record of one step.

    Args:
        progress: after the step.
        outcome: what the engine returned.
        workload: converts samples into tokens and FLOPs.
        train_iterations: planned steps of the run.
        learning_rate, seconds, loss_scale: the rate that was used, the wall time of the step, the scale in fp16.
        source_names: names of the data sources in the outcome's metrics.
        waits: what the step waited for; None if unknown.
        eta_seconds: estimated time to the end of the run.
    """
    waits = waits or Waits()
    samples_per_second = outcome.sample_count / seconds if seconds > 0.0 else 0.0
    return StepMetrics(
        iteration=progress.step,
        train_iterations=train_iterations,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_tokens,
        seconds_per_iteration=seconds,
        learning_rate=learning_rate,
        global_batch_size=outcome.sample_count,
        lm_loss=outcome.loss,
        loss_scale=loss_scale,
        skipped_iterations=int(outcome.skipped or outcome.bad_in_a_row > 0),
        nan_iterations=int(_is_not_finite(outcome)),
        samples_per_second=samples_per_second,
        tokens_per_second=samples_per_second * workload.tokens_per_sample,
        teraflops_per_device=samples_per_second * workload.flops_per_sample / workload.device_count / 1e12,
        gigaflops_without_embeddings=workload.gigaflops_without_embeddings(progress.consumed_tokens),
        **_gradient_fields(outcome),
        source_losses=source_losses(outcome.metrics, source_names) if source_names else None,
        empty_iterations=1 if outcome.loss is None else None,
        z_loss=_per_token(outcome, Z_LOSS),
        distillation_loss=_mean(outcome.metrics.get(DISTILLATION_LOSS)),
        mtp_losses=_of_depths(outcome.metrics.get(MTP_LOSS)),
        sample_loss=_mean(outcome.metrics.get(SAMPLE_LOSS)),
        order_loss=_mean(outcome.metrics.get(ORDER_LOSS)),
        routing=routing_figures(outcome.metrics),
        model_flops_utilization_ratio=workload.utilization_ratio(samples_per_second),
        data_wait_seconds=waits.data_seconds,
        communication_seconds=waits.communication_seconds,
        transfer_seconds=waits.transfer_seconds,
        bubble_ratio=workload.bubble_ratio(outcome.sample_count),
        memory_bytes=waits.memory_bytes,
        eta_seconds=eta_seconds,
    )


def source_losses(metrics: Mapping[str, Sequence[float]], names: Sequence[str]) -> dict[str, SourceLoss]:
    """The loss on each data source with counted tokens, from the metrics of the language-model objective."""
    sums = zip(names, metrics[SOURCE_LOSS], metrics[SOURCE_TOKENS], strict=True)
    return {name: SourceLoss(loss_sum / tokens, round(tokens)) for name, loss_sum, tokens in sums if tokens}


def mean_of(steps: Sequence[StepMetrics]) -> StepMetrics:
    """Combines the records of consecutive steps, as the log line shows them.

    The loss is the mean over the steps that were not skipped, so a single NaN makes it NaN; if all were, as while fp16
    looks for a loss scale, that over those with a finite one. Steps without a counted token have none. Rates are totals
    divided by total time. Learning rate, batch size, loss scale, norm, consumed counts, memory and remaining time are
    the last step's; skipped and NaN steps are counted.
    """
    last = steps[-1]
    kept = [step for step in steps if not step.skipped_iterations]
    losses = [step.lm_loss for step in kept or steps if step.lm_loss is not None]
    losses = losses if kept else [loss for loss in losses if math.isfinite(loss)]
    last_ratio = last.model_flops_utilization_ratio
    seconds = math.fsum(step.seconds_per_iteration for step in steps)

    def mean(name: str, over: Sequence[StepMetrics] = kept) -> float | None:
        """The mean of a figure that not every run has."""
        known = [value for value in (getattr(step, name) for step in over) if value is not None]
        return sum(known) / len(known) if known else None

    def rate(name: str) -> float:
        """The mean of a rate, weighted by time."""
        if seconds <= 0.0:
            return 0.0
        return math.fsum((getattr(step, name) or 0.0) * step.seconds_per_iteration for step in steps) / seconds

    noise, signal = mean("gradient_noise"), mean("gradient_signal")
    return dataclasses.replace(
        last,
        gradient_noise=noise,
        gradient_signal=signal,
        noise_scale=_noise_scale(noise, signal),
        seconds_per_iteration=seconds / len(steps),
        lm_loss=sum(losses) / len(losses) if losses else None if kept else math.nan,
        source_losses=_source_losses_of(kept),
        empty_iterations=sum(step.empty_iterations or 0 for step in steps) or None,
        z_loss=mean("z_loss"),
        sample_loss=mean("sample_loss"),
        order_loss=mean("order_loss"),
        distillation_loss=mean("distillation_loss"),
        mtp_losses=_mean_of_depths([step.mtp_losses for step in kept if step.mtp_losses is not None]),
        routing=mean_routing([step.routing for step in kept if step.routing is not None]),
        skipped_iterations=sum(step.skipped_iterations for step in steps),
        nan_iterations=sum(step.nan_iterations for step in steps),
        samples_per_second=rate("samples_per_second"),
        tokens_per_second=rate("tokens_per_second"),
        teraflops_per_device=rate("teraflops_per_device"),
        model_flops_utilization_ratio=rate("model_flops_utilization_ratio") if last_ratio is not None else None,
        data_wait_seconds=mean("data_wait_seconds", steps),
        communication_seconds=mean("communication_seconds", steps),
        transfer_seconds=mean("transfer_seconds", steps),
    )


def _source_losses_of(steps: Sequence[StepMetrics]) -> Mapping[str, SourceLoss] | None:
    """The token-weighted mean loss of each source over several steps, in order of first appearance."""
    per_step = [step.source_losses for step in steps if step.source_losses is not None]
    names = dict.fromkeys(name for losses in per_step for name in losses)
    means = {}
    for name in names:
        parts = [losses[name] for losses in per_step if name in losses]
        tokens = sum(part.tokens for part in parts)
        means[name] = SourceLoss(math.fsum(part.lm_loss * part.tokens for part in parts) / tokens, tokens)
    return means if per_step else None


def _is_not_finite(outcome: StepResult) -> bool:
    """Whether loss or, outside fp16, gradient norm were NaN or infinite."""
    is_loss_finite = outcome.loss is None or math.isfinite(outcome.loss)
    return not is_loss_finite or (outcome.bad_in_a_row > 0 and not outcome.is_spike)


def _gradient_fields(outcome: StepResult) -> dict[str, Any]:
    """What was measured of the gradients of a step."""
    estimate = outcome.noise
    noise, signal = (None, None) if estimate is None else estimate
    return {
        "gradient_norm": None if outcome.loss is None else outcome.gradient_norm,
        "gradient_norms": outcome.gradient_norms,
        "gradient_zeros": outcome.zero_gradients,
        "gradient_noise": noise,
        "gradient_signal": signal,
        "noise_scale": _noise_scale(noise, signal),
    }


def _noise_scale(noise: float | None, signal: float | None) -> float | None:
    """The batch size at which the noise of a gradient is as large as what it has in common with others."""
    return noise / signal if noise is not None and signal is not None and noise > 0.0 and signal > 0.0 else None


def _per_token(outcome: StepResult, name: str) -> float | None:
    """The mean over tokens of a metric that is a sum over them; None if the step has none, or no token counts."""
    return outcome.metrics[name][0] / outcome.token_count if name in outcome.metrics and outcome.token_count else None


def _mean(pair: Sequence[float] | None) -> float | None:
    """The mean of a metric that is a sum and what it is divided by; None if nothing was summed."""
    return None if pair is None or pair[1] == 0 else pair[0] / pair[1]


def _of_depths(sums: Sequence[float] | None) -> dict[str, float] | None:
    """The mean loss of each depth with counted tokens; the sums of all depths are followed by their counts."""
    if sums is None:
        return None
    depths = len(sums) // 2
    pairs = zip(sums[:depths], sums[depths:], strict=True)
    return {f"mtp_{depth}": total / count for depth, (total, count) in enumerate(pairs, start=1) if count}


def _mean_of_depths(steps: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    names = dict.fromkeys(name for step in steps for name in step)
    values = {name: [step[name] for step in steps if name in step] for name in names}
    return {name: math.fsum(of_depth) / len(of_depth) for name, of_depth in values.items()} if steps else None
