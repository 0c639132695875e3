"""Reports the steps of a run in order, and ends the run when their numbers can no longer be trusted."""

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
    "Look at the samples (tools/sample_idxs_to_text.py), and at the labels that --loss-on-targets-only and "
    "--eod-mask-loss leave."
)


class StepReports(Callback):
    """Reports and checks the trained steps of a run, in order.

    On a GPU the metrics of the last step may still be pending while the next one is trained (`steps_in_flight` of
    `Stopping`); before an evaluation, a save and the end, all are reported.
    """

    def __init__(self) -> None:
        self._trained: deque[TrainedStep] = deque()
        self._reported = 0
        self._empty = 0
        self._overflows_at_least = 0

    def after_step(self, run: Run, step: TrainedStep) -> None:
        """Takes a step, and reports those before it whose metrics have arrived.

        Raises:
            NumericsError: as `flush`.
        """
        if step.ends_epoch:
            _log_epoch(run)
        self._trained.append(step)
        self._report(run, run.stopping.steps_in_flight)

    def flush(self, run: Run) -> None:
        """Reports all steps.

        Raises:
            NumericsError: more than --max-bad-steps consecutive steps were not applied, or gradients of fp16 overflow
                with a loss scale that cannot fall.
        """
        self._report(run, 0)

    def trained(self, run: Run) -> None:
        """Reports all steps; checks that the weights were updated if no token counted in any step of this start.

        Raises:
            DataError: they were not.
            NumericsError: as `flush`.
        """
        self.flush(run)
        is_whole = run.stopping.verdict is StopVerdict.CONTINUE
        if is_whole and self._reported and self._empty == self._reported and run.engine.update_count == 0:
            raise DataError(
                f"nothing was trained: in none of the {self._empty} steps does a token count in the loss. "
                f"{EMPTY_ADVICE}"
            )

    def _report(self, run: Run, keep: int) -> None:
        while len(self._trained) > keep:
            step = self._trained.popleft()
            metrics = [*_waits(step, has_stages=run.mesh.pp.size > 1)]
            if step.weight_norms is not None:
                metrics += norm_metrics(run.engine.layer_names, step.weight_norms)
            run.report.step(step.progress, step.result, step.learning_rate, step.seconds, metrics)
            run.progress = run.progress.counted(is_skipped=step.result.skipped, is_bad=step.result.consecutive_bad > 0)
            check_numbers(run, step.progress, step.result)
            self._check_scale(run, step.progress, step.result)
            self._count(run, step.progress, step.result)

    def _check_scale(self, run: Run, progress: Progress, result: StepResult) -> None:
        """Ends a run in fp16 whose gradients overflow with a loss scale that cannot fall, or not any more."""
        if not result.skipped:
            self._overflows_at_least = 0
            return
        precision = run.config.precision
        scale, way_out = "constant loss scale, {:g} (--loss-scale)", "without --loss-scale, so that it falls"
        if precision.loss_scale is None:
            scale, way_out = "least loss scale, {:g} (--min-loss-scale)", "with a lower --lr or a longer warm-up"
        is_least = precision.loss_scale is not None or result.loss_scale <= precision.min_loss_scale
        self._overflows_at_least += int(is_least)
        if self._overflows_at_least > max(precision.hysteresis, run.config.safety.max_bad_steps):
            raise NumericsError(
                f"iteration {progress.step}: gradients overflow in float16 with the {scale.format(result.loss_scale)}, "
                f"{self._overflows_at_least} times in a row. The last checkpoint is intact. Resume from it {way_out}, "
                "or train with --bf16.",
                step=progress.step,
            )

    def _count(self, run: Run, progress: Progress, result: StepResult) -> None:
        """Counts the steps, and the steps of which no token counts in the loss; warns of the first of the latter."""
        self._reported += 1
        if result.loss is not None:
            return
        self._empty += 1
        if self._empty == 1 and run.mesh.control.rank == 0:
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
        f"{wrong}, and --max-bad-steps {safety.max_bad_steps} allows no more such steps in a row. The last checkpoint "
        "is intact. Resume from it with a higher --max-bad-steps if single batches are bad, else with a lower --lr, a "
        "longer warm-up or --skip-train-iteration-range.",
        step=progress.step,
    )


def _log_epoch(run: Run) -> None:
    """Logs that a pass over the training data is complete; of passes shorter than the interval between log lines, only
    passes that complete at a log line, and the last one.
    """
    epochs, optim, interval = run.config.finetuning.epochs, run.config.optim, run.config.report.log_interval
    samples = samples_per_epoch(epochs, optim)
    if epochs is None or samples is None:
        return
    if samples >= interval * optim.global_batch_size or run.is_done or run.is_due(interval):
        completed = min(run.progress.consumed_samples // samples, epochs)
        log.info(f"epoch {completed}/{epochs} is complete after iteration {run.progress.step}")


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
