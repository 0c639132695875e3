"""Training of one step."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.config.schedule import learning_rate, samples_per_epoch, weight_decay
from megatron.device import Elapsed
from megatron.engine.totals import StepResult
from megatron.engine.weight_norms import weight_norms
from megatron.train.run import Run


@dataclass(frozen=True)
class TrainedStep:
    """A trained step; its metrics may still be on the device.

    Attributes:
        progress: after the step; skipped and bad steps are counted when the step is reported.
        seconds: wall time of the step.
        data_seconds: time until its batch was read, included in `seconds`.
        messages: communication time; None with one rank.
        weight_norms: see `megatron.engine.weight_norms`; None unless due.
        ends_epoch: the step completed an epoch of --epochs.
    """

    progress: Progress
    result: StepResult
    learning_rate: float
    seconds: float
    data_seconds: float
    messages: Elapsed | None
    weight_norms: torch.Tensor | None = None
    ends_epoch: bool = False


def train_step(run: Run) -> TrainedStep:
    """Trains on the next global batch; the caller updates the progress of the run."""
    started_at = time.monotonic()
    optim, before, length, stopwatch = run.config.optim, run.progress, run.next_length, run.mesh.stopwatch
    rate = learning_rate(optim, before.consumed_samples, before.consumed_tokens)
    decay = weight_decay(optim, before.consumed_samples, before.consumed_tokens)
    log.set_activity(f"step {before.step + 1} of {optim.train_iters}")
    batches = run.train_batches()
    data_seconds = time.monotonic() - started_at
    if stopwatch is not None:
        stopwatch.start()
    result = run.engine.train_batch(batches, rate, decay)
    progress = before.after(result.sample_count, result.sample_count * length)
    seconds = time.monotonic() - started_at
    messages = None if stopwatch is None else stopwatch.take()
    reporting = run.config.report
    are_due = reporting.log_params_norm and reporting.log_interval and progress.step % reporting.log_interval == 0
    norms = weight_norms(run.engine) if are_due else None
    samples = samples_per_epoch(run.config.finetuning.epochs, optim)
    ends_epoch = samples is not None and progress.consumed_samples // samples > before.consumed_samples // samples
    return TrainedStep(progress, result, rate, seconds, data_seconds, messages, norms, ends_epoch)
