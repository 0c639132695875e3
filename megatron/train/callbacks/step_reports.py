"""Reports the steps of a run in order, and ends the run when training diverges."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.config.schedule import samples_per_epoch
from megatron.device import peak_memory_bytes
from megatron.engine.totals import StepResult
from megatron.engine.weight_norms import norm_metrics
from megatron.errors import DataError, NumericsError
from megatron.objective.metric import Metric, Reduction, metrics_of
from megatron.parallel.messages import TRANSFER
from megatron.train.callback import Callback
from megatron.train.run import Run
from megatron.train.steps import TrainedStep
from megatron.train.stop import StopVerdict

EMPTY_ADVICE = (
    "Check the samples (tools/sample_idxs_to_text.py), and the labels that --loss-on-targets-only and --eod-mask-loss "
    "leave."
)


class StepReports(Callback):
    """Reports and checks the steps of a run, in order.

    On a GPU the metrics of the last step may be pending while the next one is trained (`Stopping.steps_in_flight`);
    `flush` reports all steps before an evaluation, a save and the end.
    """

    def __init__(self) -> None:
        self._trained: deque[TrainedStep] = deque()
        self._reported = 0
        self._empty = 0
        self._overflows_at_minimum = 0

    def after_step(self, run: Run, step: TrainedStep) -> None:
        """Adds a step, and reports earlier steps whose metrics have arrived.

        Raises:
            NumericsError: see `flush`.
        """
        if step.ends_epoch:
            _log_epoch(run)
        self._trained.append(step)
        self._report(run, run.stopping.steps_in_flight)

    def flush(self, run: Run) -> None:
        """Reports all steps.

        Raises:
            NumericsError: more than --max-bad-steps consecutive updates were skipped, or fp16 gradients overflow with
                the minimum loss scale.
        """
        self._report(run, 0)

    def trained(self, run: Run) -> None:
        """Reports all steps.

        Raises:
            DataError: no token counted in any step, and the weights were never updated.
            NumericsError: see `flush`.
        """
        self.flush(run)
        is_whole = run.stopping.verdict is StopVerdict.CONTINUE
        if is_whole and self._reported and self._empty == self._reported and run.engine.update_count == 0:
            raise DataError(
                f"nothing was trained: no token counts in the loss in any of the {self._empty} steps. {EMPTY_ADVICE}"
            )

    def _report(self, run: Run, keep: int) -> None:
        while len(self._trained) > keep:
            step = self._trained.popleft()
            metrics = [*_step_timings(step, has_stages=run.mesh.pp.size > 1)]
            if step.weight_norms is not None:
                metrics += norm_metrics(run.engine.layer_names, step.weight_norms)
            run.report.step(step.progress, step.result, step.learning_rate, step.seconds, metrics)
            run.progress = run.progress.counted(is_skipped=step.result.skipped, is_bad=step.result.consecutive_bad > 0)
            check_numbers(run, step.progress, step.result)
            self._check_scale(run, step.progress, step.result)
            self._count(run, step.progress, step.result)

    def _check_scale(self, run: Run, progress: Progress, result: StepResult) -> None:
        """Ends an fp16 run whose gradients overflow with a constant or minimum loss scale."""
        if not result.skipped:
            self._overflows_at_minimum = 0
            return
        precision = run.config.precision
        scale, advice = "constant loss scale, {:g} (--loss-scale)", "without --loss-scale, for a dynamic one"
        if precision.loss_scale is None:
            scale, advice = "minimum loss scale, {:g} (--min-loss-scale)", "with a lower --lr or a longer warm-up"
        is_least = precision.loss_scale is not None or result.loss_scale <= precision.min_loss_scale
        self._overflows_at_minimum += int(is_least)
        if self._overflows_at_minimum > max(precision.hysteresis, run.config.safety.max_bad_steps):
            raise NumericsError(
                f"iteration {progress.step}: gradients overflow in float16 with the {scale.format(result.loss_scale)}, "
                f"{self._overflows_at_minimum} times in a row. The last checkpoint is intact. Resume from it {advice}, "
                "or train with --bf16.",
                step=progress.step,
            )

    def _count(self, run: Run, progress: Progress, result: StepResult) -> None:
        """Counts steps, and steps without counted tokens; warns of the first of these."""
        self._reported += 1
        if result.loss is not None:
            return
        self._empty += 1
        if self._empty == 1 and run.mesh.control.rank == 0:
            first, last = progress.consumed_samples - result.sample_count, progress.consumed_samples - 1
            log.warning(
                f"iteration {progress.step} has no loss and did not change the weights: no token of its batch (samples "
                f"{first} to {last}) counts. This warning is not repeated. {EMPTY_ADVICE}"
            )


def check_numbers(run: Run, progress: Progress, step: StepResult) -> None:
    """Warns of an update that was skipped because of its loss or gradient.

    Args:
        progress: after the step.

    Raises:
        NumericsError: more than --max-bad-steps consecutive updates were skipped.
    """
    if step.consecutive_bad == 0:
        return
    safety = run.config.safety
    wrong = f"iteration {progress.step}: loss {step.loss}, gradient norm {step.gradient_norm}"
    if step.is_spike:
        wrong += f", more than {safety.skip_spikes:g} standard deviations above the recent mean (--skip-spikes)"
    elif step.finite_check is not None:
        wrong += f". {step.finite_check.describe(run.engine.layer_names, run.mesh)}"
    first = progress.consumed_samples - step.sample_count
    wrong += f". The update was not applied (samples {first} to {progress.consumed_samples - 1})"
    if step.consecutive_bad <= safety.max_bad_steps:
        if run.mesh.control.rank == 0:
            log.warning(f"{wrong}; {step.consecutive_bad} of at most {safety.max_bad_steps} consecutive such steps.")
        return
    raise NumericsError(
        f"{wrong}; this exceeds --max-bad-steps {safety.max_bad_steps}. The last checkpoint is intact. Resume from it "
        "with a higher --max-bad-steps if only single batches are bad, else with a lower --lr, a longer warm-up or "
        "--skip-train-iteration-range.",
        step=progress.step,
    )


def _log_epoch(run: Run) -> None:
    """Logs a completed epoch; epochs shorter than the log interval only at a log line or at the end."""
    epochs, optim, interval = run.config.finetuning.epochs, run.config.optim, run.config.report.log_interval
    samples = samples_per_epoch(epochs, optim)
    if epochs is None or samples is None:
        return
    if samples >= interval * optim.global_batch_size or run.is_done or run.is_due(interval):
        completed = min(run.progress.consumed_samples // samples, epochs)
        log.info(f"epoch {completed}/{epochs} is complete after iteration {run.progress.step}")


def _step_timings(step: TrainedStep, *, has_stages: bool) -> Iterator[Metric]:
    """Waiting times of a step on this rank, and the peak memory of its process so far.

    Communication includes waiting for other ranks: collectives of tensor-parallel layers and of the loss, and all of
    DeepSpeed's communication; transfers are the part between pipeline stages. On a GPU it is the time on the stream
    that waits for the message, so DeepSpeed's overlapped communication counts, too. Does not block, since the metrics
    of the step have arrived.
    """
    messages = step.messages
    seconds = {
        "data_wait_seconds": step.data_seconds,
        "communication_seconds": None if messages is None else messages.seconds(),
        "transfer_seconds": messages.seconds(TRANSFER) if messages is not None and has_stages else None,
    }
    yield from metrics_of(seconds, Reduction.RATE)
    yield from metrics_of({"memory_bytes": peak_memory_bytes()}, Reduction.LAST)
