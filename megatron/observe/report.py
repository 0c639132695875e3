"""Reports the metrics of every step to the console, `metrics.jsonl`, TensorBoard and W&B.

The last rank prints the console lines, as in upstream. Rank 0 writes all files, so that they are on one machine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.config import OptimConfig, ReportConfig
from megatron.config.schedule import planned_iterations
from megatron.engine.totals import StepResult
from megatron.errors import StorageError
from megatron.objective.metric import Metric, StepMetrics
from megatron.observe.console import LineStyle, LogPosition, task_lines
from megatron.observe.destinations.destination import Destination, Safeguard
from megatron.observe.destinations.tensorboard import TensorBoard, check_tensorboard
from megatron.observe.destinations.weights_and_biases import WeightsAndBiases, check_wandb
from megatron.observe.metrics import TaskOutcome, mean_of, measure
from megatron.observe.metrics_file import MetricsFile
from megatron.observe.routing import CollapseWatch, layers_of_step, routing_metrics
from megatron.observe.run_directory import RunDirectory
from megatron.observe.speed import Workload
from megatron.secret_text import masked_values


class Pace:
    """Estimates the remaining time of a run from the wall time of steps, evaluations and saves.

    The first step includes one-time costs (compilation, allocation, first reads), so it counts only until the second.

    Args:
        clock: seconds from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: list[tuple[int, float]] = []

    def mark(self, step: int) -> None:
        """Records the number of completed steps; called when training starts and after each step."""
        now = self._clock()
        if self._marks and self._marks[-1][0] == step:
            return
        # The first two marks enclose the first step; of later ones only the newest is needed.
        del self._marks[2:]
        self._marks.append((step, now))

    def seconds_left(self, step: int, train_iterations: int) -> float | None:
        """The estimated time from the last mark to the last step; None before two marks."""
        if len(self._marks) < 2:
            return None
        (first, started_at), (last, now) = self._marks[-2:] if len(self._marks) == 2 else self._marks[1:]
        return max(0, train_iterations - step) * (now - started_at) / (last - first)


class Bar(Protocol):
    """A progress bar on a terminal."""

    def step(self, metrics: StepMetrics) -> None:
        """Called after every step."""


@dataclass(frozen=True)
class ReportOutputs:
    """The outputs of a run's report on this rank.

    Attributes:
        style: format of the lines of steps and evaluations.
        destinations: the destinations besides the console; empty on ranks that write nothing.
        bar: the progress bar of this process, if any.
        hides_lines: write the lines of steps only to log.txt, since rank 0 draws a bar instead.
    """

    style: LineStyle
    destinations: Sequence[Destination] = ()
    bar: Bar | None = None
    hides_lines: bool = False


class Report:
    """Receives the events of the training loop and forwards them to all destinations.

    A destination that fails does not end the run: see `Safeguard`.

    Args:
        config: provides the log interval.
        optim: determines the length of the run.
        workload: converts samples to tokens and FLOPs.
        outputs: the outputs on this rank.
        samples_per_epoch: training samples per epoch; None without training data.
        pace: estimates the remaining time.
        shows_loss_scale: report the loss scale (fp16).
        arguments: all arguments by name, for destinations that show them.
        experts_per_token: the k of the routers, see `CollapseWatch`.
    """

    def __init__(
        self,
        config: ReportConfig,
        optim: OptimConfig,
        workload: Workload,
        outputs: ReportOutputs,
        *,
        samples_per_epoch: int | None = None,
        pace: Pace | None = None,
        shows_loss_scale: bool = False,
        arguments: Mapping[str, Any] | None = None,
        experts_per_token: int = 1,
    ) -> None:
        self.config = config
        self.optim = optim
        self.workload = workload
        self.style = outputs.style
        self.samples_per_epoch = samples_per_epoch
        self.shows_loss_scale = shows_loss_scale
        self.arguments = masked_values(arguments or {})
        self.destinations = tuple(Safeguard(destination) for destination in outputs.destinations)
        self._bar = outputs.bar
        self._hides_lines = outputs.hides_lines
        self._unreported: list[StepMetrics] = []
        self._pace = pace or Pace()
        self._train_iterations = planned_iterations(optim)
        self._routers = CollapseWatch(experts_per_token)

    def started(self, progress: Progress) -> None:
        """Reports that training starts or resumes."""
        self._train_iterations = planned_iterations(
            self.optim, progress.step, progress.consumed_samples, progress.consumed_tokens
        )
        self._pace.mark(progress.step)
        self._record("start", progress.step, lambda destination: destination.start(progress, self.arguments))

    def step(
        self,
        progress: Progress,
        outcome: StepResult,
        learning_rate: float,
        seconds: float,
        others: Iterable[Metric] = (),
    ) -> StepMetrics:
        """Reports one step, and prints a line at the end of each --log-interval.

        Args:
            progress: after the step.
            outcome: the result of the engine.
            seconds: wall time of the step.
            others: additional metrics.
        """
        self._pace.mark(progress.step)
        layers = layers_of_step(outcome.sums)
        metrics = measure(
            progress,
            outcome,
            self.workload.at_length(self.optim.length_of_step(progress.step)),
            [*routing_metrics(outcome.sums, layers), *others],
            train_iterations=self._train_iterations,
            learning_rate=learning_rate,
            seconds=seconds,
            loss_scale=outcome.loss_scale if self.shows_loss_scale else None,
            eta_seconds=self._pace.seconds_left(progress.step, self._train_iterations),
        )
        self._record("step", progress.step, lambda destination: destination.step(metrics))
        if self._bar is not None:
            self._bar.step(metrics)
        if not metrics.value("skipped_iterations"):
            for sentence in self._routers.sentences(layers):
                log.shared_warning(f"iteration {progress.step}: {sentence}")
        self._unreported.append(metrics)
        if self.config.log_interval and progress.step % self.config.log_interval == 0:
            self.flush()
        return metrics

    def evaluation(self, progress: Progress, group: str, prefix: str, loss: float | None) -> None:
        """Reports the loss of one data group.

        Args:
            prefix: the point in training as text, such as "iteration 100".
            loss: mean loss per counted token, in nats; None if no token counts.
        """
        position = self._position(progress.step, progress.consumed_samples)
        lines = self.style.evaluation_lines(group, prefix, loss, position) if loss is not None else ()
        for text in lines:
            log.line(text)
        self._record("evaluation", progress.step, lambda destination: destination.evaluation(progress, group, loss))

    def task(self, progress: Progress, prefix: str, task: TaskOutcome) -> None:
        """Reports the results of one task of --eval-tasks.

        Args:
            prefix: the point in training as text, such as "iteration 100".
        """
        for text in task_lines(task, prefix):
            log.line(text)
        self._record("task", progress.step, lambda destination: destination.task(progress, task))

    def skipped_batch(self, progress: Progress, batch: Mapping[str, int], number: int) -> None:
        """Reports a skipped batch.

        Args:
            progress: after the batch.
            batch: an entry of `Record.passed_batches`.
            number: skipped batches in this run so far, including this one.
        """
        log.line(
            f"skipped the batch of iteration {batch['step']} (samples {batch['first_sample']} to "
            f"{batch['last_sample']}), on which starts of this run ended in NaN | skipped batches: {number:3d}"
        )
        self._record(
            "skipped_batch", batch["step"], lambda destination: destination.skipped_batch(progress, batch, number)
        )

    def failed_save(self, progress: Progress, step: int, reason: str, number: int) -> None:
        """Reports a failed save.

        Args:
            progress: at the time of the report.
            step: the step of the checkpoint.
            number: consecutive failures, including this one.
        """
        self._record(
            "failed_save", progress.step, lambda destination: destination.failed_save(progress, step, reason, number)
        )

    def flush(self) -> None:
        """Prints the line for the steps since the last line, if any; also called at the end of a run."""
        if not self._unreported:
            return
        metrics, self._unreported = mean_of(self._unreported), []
        step = metrics.value("iteration")
        for text in self.style.iteration_lines(metrics, self._position(step, metrics.value("consumed_samples"))):
            (log.record if self._hides_lines else log.line)(text)
        self._record("interval", step, lambda destination: destination.interval(metrics))

    def close(self) -> None:
        """Prints remaining steps, closes all destinations, and warns of missing records."""
        self.flush()
        log.close_status()
        for destination in self.destinations:
            destination.close()
        self.destinations = ()
        log.warn_of_lost_output()

    def _record(self, call: str, step: int, write: Callable[[Destination], None]) -> None:
        for destination in self.destinations:
            destination.record(call, step, write)

    def _position(self, step: int, consumed_samples: int) -> LogPosition:
        epoch = 0 if self.samples_per_epoch is None else max(0, consumed_samples - 1) // self.samples_per_epoch
        return LogPosition(step, self._train_iterations, epoch, self._pace.seconds_left(step, self._train_iterations))


def check_packages(config: ReportConfig) -> None:
    """Checks that the packages of the requested destinations are installed.

    Raises:
        ConfigError: one is missing.
    """
    if config.tensorboard_dir:
        check_tensorboard(config.tensorboard_dir)
    if config.wandb_project:
        check_wandb(config.wandb_project)


def open_destinations(
    config: ReportConfig,
    workload: Workload,
    run_directory: RunDirectory,
    *,
    is_resume: bool = False,
    loss_tags: tuple[str, str] | None = None,
) -> list[Destination]:
    """Opens all requested destinations; called only on the process that writes files.

    A destination that cannot be opened is an error, except W&B when a run is resumed, possibly unattended.

    Args:
        workload: for the rates per replica.
        run_directory: the folder of the run, for `metrics.jsonl`.
        is_resume: the run resumes from a checkpoint.
        loss_tags: additional TensorBoard tags of the training and the validation loss.

    Raises:
        ConfigError: an optional package is missing, or another run is writing the same file.
        StorageError: the file or the service cannot be opened.
    """
    opened: list[Destination] = []
    with contextlib.ExitStack() as closing:
        opened.append(MetricsFile(config.metrics_file or run_directory.metrics_path))
        closing.callback(opened[0].close)
        if config.tensorboard_dir:
            opened.append(TensorBoard(config.tensorboard_dir, config, workload, loss_tags))
            closing.callback(opened[-1].close)
        if config.wandb_project:
            folder = config.wandb_save_dir or str(run_directory.path)
            try:
                opened.append(
                    WeightsAndBiases(config.wandb_project, config.wandb_exp_name, folder, config.wandb_entity)
                )
            except StorageError as failure:
                if not is_resume:
                    raise
                log.warning(f"{failure} The resumed run continues without it.")
        closing.pop_all()
    return opened
