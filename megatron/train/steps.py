"""The steps of a run: trained, reported in order, and the run's end when their numbers can no longer be trusted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.config.schedule import learning_rate, weight_decay
from megatron.device import Elapsed, peak_memory_bytes
from megatron.engine.totals import StepResult
from megatron.engine.weight_norms import norm_metrics, weight_norms
from megatron.errors import DataError, NumericsError
from megatron.objective.metric import Metric, Reduction, metrics_of
from megatron.parallel.messages import TRANSFER
from megatron.train.run import Run

EMPTY_ADVICE = (
    "Look at the samples (tools/sample_idxs_to_text.py), and at the labels that --loss-on-targets-only and "
    "--eod-mask-loss leave."
)


@dataclass(frozen=True)
class TrainedStep:
    """A trained step; its metrics may still be on the device.

    Attributes:
        progress: after the step; whether it was skipped, or a bad one, is counted when it is reported.
        learning_rate: the learning rate that was used.
        seconds: wall time of the step.
        data_seconds: of these, until its batch was read.
        messages: what its messages took; None with one rank, which sends none.
        weight_norms: see `megatron.engine.weight_norms`; None unless asked for.
    """

    progress: Progress
    result: StepResult
    learning_rate: float
    seconds: float
    data_seconds: float
    messages: Elapsed | None
    weight_norms: torch.Tensor | None = None


def train_step(run: Run) -> TrainedStep:
    """Trains on the next global batch; the progress of the run is left to the caller."""
    started_at = time.monotonic()
    optim, before, length, stopwatch = run.config.optim, run.progress, run.next_length, run.mesh.stopwatch
    rate = learning_rate(optim, before.consumed_samples, before.consumed_tokens)
    decay = weight_decay(optim, before.consumed_samples, before.consumed_tokens)
    log.doing(f"step {before.step + 1} of {optim.train_iters}")
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
    return TrainedStep(progress, result, rate, seconds, data_seconds, messages, norms)


class StepReports:
    """Reports and checks the trained steps of a run, in order.

    Args:
        in_flight: number of steps whose metrics may still be pending while the next step is trained: one on a GPU, so
            that the host does not wait for the device, and none on a CPU, where it would not help.
    """

    def __init__(self, run: Run, in_flight: int) -> None:
        self._run = run
        self._in_flight = in_flight
        self._trained: deque[TrainedStep] = deque()
        self._reported = 0
        self._empty = 0
        self._overflows_at_least = 0

    def add(self, step: TrainedStep) -> None:
        """Takes a step, and reports those before it whose metrics have arrived.

        Raises:
            NumericsError: as `flush`.
        """
        self._trained.append(step)
        self._report(self._in_flight)

    def flush(self) -> None:
        """Reports all steps.

        Raises:
            NumericsError: more than --max-bad-steps consecutive steps were not applied, or gradients of fp16 overflow
                with a loss scale that cannot fall.
        """
        self._report(0)

    def check_trained(self) -> None:
        """Checks, at the end of a run, that its weights were updated if no token counted in any step of this start.

        Raises:
            DataError: they were not.
        """
        if self._reported and self._empty == self._reported and self._run.engine.update_count == 0:
            raise DataError(
                f"nothing was trained: in none of the {self._empty} steps does a token count in the loss. "
                f"{EMPTY_ADVICE}"
            )

    def _report(self, keep: int) -> None:
        run = self._run
        while len(self._trained) > keep:
            step = self._trained.popleft()
            metrics = [*_waits(step, has_stages=run.mesh.pp.size > 1)]
            if step.weight_norms is not None:
                metrics += norm_metrics(run.engine.layer_names, step.weight_norms)
            run.report.step(step.progress, step.result, step.learning_rate, step.seconds, metrics)
            run.progress = run.progress.counted(is_skipped=step.result.skipped, is_bad=step.result.bad_in_a_row > 0)
            check_numbers(run, step.progress, step.result)
            self._check_scale(step.progress, step.result)
            self._count(step.progress, step.result)

    def _check_scale(self, progress: Progress, result: StepResult) -> None:
        """Ends a run in fp16 whose gradients overflow with a loss scale that cannot fall, or not any more."""
        if not result.skipped:
            self._overflows_at_least = 0
            return
        precision = self._run.config.precision
        scale, way_out = "constant loss scale, {:g} (--loss-scale)", "without --loss-scale, so that it falls"
        if precision.loss_scale is None:
            scale, way_out = "least loss scale, {:g} (--min-loss-scale)", "with a lower --lr or a longer warm-up"
        is_least = precision.loss_scale is not None or result.loss_scale <= precision.min_loss_scale
        self._overflows_at_least += int(is_least)
        if self._overflows_at_least > max(precision.hysteresis, self._run.config.safety.max_bad_steps):
            raise NumericsError(
                f"iteration {progress.step}: gradients overflow in float16 with the {scale.format(result.loss_scale)}, "
                f"{self._overflows_at_least} times in a row. The last checkpoint is intact. Resume from it {way_out}, "
                "or train with --bf16.",
                step=progress.step,
            )

    def _count(self, progress: Progress, result: StepResult) -> None:
        """Counts the steps, and the steps of which no token counts in the loss; warns of the first of the latter."""
        self._reported += 1
        if result.loss is not None:
            return
        self._empty += 1
        if self._empty == 1 and self._run.mesh.control.rank == 0:
            first, last = progress.consumed_samples - result.sample_count, progress.consumed_samples - 1
            log.warning(
                f"iteration {progress.step} has no loss and changed no weight: none of the tokens of its batch "
                f"(samples {first} to {last}) counts. Later steps like it are only counted. {EMPTY_ADVICE}"
            )


def check_numbers(run: Run, progress: Progress, step: StepResult) -> None:
    """Warns of a step whose update was not applied because of its loss or gradient, and ends the run if there were too
    many in a row.

    Args:
        progress: after the step.

    Raises:
        NumericsError: more than --max-bad-steps consecutive steps were not applied.
    """
    if step.bad_in_a_row == 0:
        return
    safety = run.config.safety
    wrong = f"iteration {progress.step}: loss {step.loss}, gradient norm {step.gradient_norm}"
    if step.is_spike:
        wrong += f", more than {safety.skip_spikes:g} standard deviations above the recent mean (--skip-spikes)"
    elif step.finite_check is not None:
        wrong += f". {step.finite_check.describe(run.engine.layer_names, run.mesh)}"
    first = progress.consumed_samples - step.sample_count
    wrong += f". The update was not applied (samples {first} to {progress.consumed_samples - 1})"
    if step.bad_in_a_row <= safety.max_bad_steps:
        if run.mesh.control.rank == 0:
            log.warning(f"{wrong}; {step.bad_in_a_row} of at most {safety.max_bad_steps} consecutive such steps.")
        return
    raise NumericsError(
        f"{wrong}, and --max-bad-steps {safety.max_bad_steps} allows no more such steps in a row. The last checkpoint "
        "is intact. Resume from it with a higher --max-bad-steps if single batches are bad, else with a lower --lr, a "
        "longer warm-up or --skip-train-iteration-range.",
        step=progress.step,
    )


def _waits(step: TrainedStep, *, has_stages: bool) -> Iterator[Metric]:
    """What a step waited for on this rank, and the most memory that its process has held so far.

    Communication is the time of messages to and from other ranks, waiting for these ranks included: the collectives of
    tensor-parallel layers and of the loss, and all that DeepSpeed sends; transfers are the part of it between stages of
    a pipeline. On a GPU it is the time on the stream that waits for the message; what DeepSpeed sends during the
    computation then counts although nothing waits for it. The metrics of the step have arrived, so this does not wait.
    """
    messages = step.messages
    seconds = {
        "data_wait_seconds": step.data_seconds,
        "communication_seconds": None if messages is None else messages.seconds(),
        "transfer_seconds": messages.seconds(TRANSFER) if messages is not None and has_stages else None,
    }
    yield from metrics_of(seconds, Reduction.RATE)
    yield from metrics_of({"memory_bytes": peak_memory_bytes()}, Reduction.LAST)
