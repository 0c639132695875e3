"""Reports one `Metrics` record per step to the console, `metrics.jsonl`, TensorBoard and W&B.

The last rank prints the console lines, as in upstream. A single process, chosen where the report is opened, writes all
files, so that they are on one machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.config import ControlConfig, OptimConfig
from megatron.config.schedule import planned_iterations
from megatron.errors import StorageError
from megatron.observe.console import task_lines
from megatron.observe.line_style import LineStyle, Moment
from megatron.observe.metrics import Interval, Metrics, StepOutcome, TaskOutcome, measure
from megatron.observe.metrics_file import MetricsFile
from megatron.observe.pace import Pace
from megatron.observe.run_directory import RunDirectory
from megatron.observe.safeguard import Destination, Safeguard
from megatron.observe.speed.waits import Waits
from megatron.observe.speed.workload import Workload
from megatron.observe.tensorboard import TensorBoard, check_tensorboard
from megatron.observe.weights_and_biases import WeightsAndBiases, check_wandb


class Bar(Protocol):
    """What draws the progress on a terminal."""

    def step(self, metrics: Metrics) -> None:
        """Called after every step."""


class Report:
    """Receives the events of the training loop and forwards them to all destinations.

    A destination that fails does not end the run: see `Safeguard`.

    Args:
        control: provides the log interval.
        optim: determines the length of the run.
        workload: what turns samples into tokens and operations.
        style: how the lines of steps and evaluations look.
        samples_per_epoch: training samples of a pass over all data; None without training data.
        pace: estimates when the run ends.
        shows_loss_scale: whether to report the loss scale (fp16).
        arguments: every argument by name, for destinations that show them.
        destinations: the destinations besides the console; empty on ranks that write nothing.
        source_names: names of the data sources whose losses are reported; empty for none.
        bar: the bar that this process draws; None for none.
        hides_lines: whether the lines of steps are kept in log.txt alone, since rank 0 draws a bar in their place.
    """

    def __init__(
        self,
        control: ControlConfig,
        optim: OptimConfig,
        workload: Workload,
        style: LineStyle,
        *,
        samples_per_epoch: int | None = None,
        pace: Pace | None = None,
        shows_loss_scale: bool = False,
        arguments: Mapping[str, Any] | None = None,
        destinations: Sequence[Destination] = (),
        source_names: Sequence[str] = (),
        bar: Bar | None = None,
        hides_lines: bool = False,
    ) -> None:
        self.control = control
        self.optim = optim
        self.workload = workload
        self.style = style
        self.samples_per_epoch = samples_per_epoch
        self.shows_loss_scale = shows_loss_scale
        self.arguments = dict(arguments or {})
        self.destinations = tuple(Safeguard(destination) for destination in destinations)
        self.source_names = tuple(source_names)
        self._bar = bar
        self._hides_lines = hides_lines
        self._interval = Interval()
        self._pace = pace or Pace()
        self._train_iterations = planned_iterations(optim)

    def started(self, progress: Progress) -> None:
        """Reports that training starts or resumes."""
        self._train_iterations = planned_iterations(
            self.optim, progress.step, progress.consumed_samples, progress.consumed_tokens
        )
        self._pace.mark(progress.step)
        for destination in self.destinations:
            destination.start(progress, self.arguments)

    def step(
        self,
        progress: Progress,
        outcome: StepOutcome,
        learning_rate: float,
        seconds: float,
        waits: Waits | None = None,
        sample_tokens: int | None = None,
    ) -> Metrics:
        """Reports one step, and prints a line at the end of each --log-interval.

        Args:
            progress: after the step.
            outcome: what the engine returned.
            learning_rate: the rate that was applied.
            seconds: wall time of the step.
            waits: what it waited for; None if that is not known.
            sample_tokens: tokens of each sample, which a curriculum shortens; None for those of the workload.
        """
        self._pace.mark(progress.step)
        metrics = measure(
            progress,
            outcome,
            self.workload.at_length(self.optim.length_of_step(progress.step)),
            train_iterations=self._train_iterations,
            learning_rate=learning_rate,
            seconds=seconds,
            loss_scale=outcome.loss_scale if self.shows_loss_scale else None,
            source_names=self.source_names,
            waits=waits,
            eta_seconds=self._pace.seconds_left(progress.step, self._train_iterations),
        )
        for destination in self.destinations:
            destination.step(metrics)
        if self._bar is not None:
            self._bar.step(metrics)
        self._interval.add(metrics)
        if self.control.log_interval and progress.step % self.control.log_interval == 0:
            self.flush()
        return metrics

    def evaluation(self, progress: Progress, group: str, prefix: str, loss: float) -> None:
        """Reports the loss of one data group.

        Args:
            progress: the point in training.
            group: the group's name.
            prefix: the same as text, such as "iteration 100".
            loss: mean loss per token, in nats.
        """
        for text in self.style.evaluation_lines(
            group, prefix, loss, self._moment(progress.step, progress.consumed_samples)
        ):
            log.line(text)
        for destination in self.destinations:
            destination.evaluation(progress, group, loss)

    def task(self, progress: Progress, prefix: str, task: TaskOutcome) -> None:
        """Reports the figures of one task of --eval-tasks.

        Args:
            progress: the point in training.
            prefix: the same as text, such as "iteration 100".
            task: what was measured.
        """
        for text in task_lines(task, prefix):
            log.line(text)
        for destination in self.destinations:
            destination.task(progress, task)

    def passed(self, progress: Progress, batch: Mapping[str, int], number: int) -> None:
        """Reports a batch that was not trained on.

        Args:
            progress: after it.
            batch: as in `Record.passed_batches`.
            number: how many there were in this run, this one included.
        """
        log.line(
            f"passed over the batch of iteration {batch['step']} (samples {batch['first_sample']} to "
            f"{batch['last_sample']}), on which starts of this run ended in NaN | passed batches: {number:3d}"
        )
        for destination in self.destinations:
            destination.passed(progress, batch, number)

    def flush(self) -> None:
        """Prints the line for the steps since the last one, if any; also called when a run ends within a log
        interval.
        """
        metrics = self._interval.close()
        if metrics is None:
            return
        for text in self.style.iteration_lines(metrics, self._moment(metrics.iteration, metrics.consumed_samples)):
            (log.record if self._hides_lines else log.line)(text)
        for destination in self.destinations:
            destination.interval(metrics)

    def close(self) -> None:
        """Prints remaining steps, closes every destination, and says what is missing in them."""
        self.flush()
        log.close_status()
        for destination in self.destinations:
            destination.close()
        self.destinations = ()
        log.warn_of_lost_output()

    def _moment(self, step: int, consumed_samples: int) -> Moment:
        epoch = 0 if self.samples_per_epoch is None else max(0, consumed_samples - 1) // self.samples_per_epoch
        return Moment(step, self._train_iterations, epoch, self._pace.seconds_left(step, self._train_iterations))


def check_packages(control: ControlConfig) -> None:
    """Checks that the packages of the requested destinations are installed, before anything heavy is built.

    Raises:
        ConfigError: one is missing.
    """
    if control.tensorboard_dir:
        check_tensorboard(control.tensorboard_dir)
    if control.wandb_project:
        check_wandb(control.wandb_project)


def open_destinations(
    control: ControlConfig, workload: Workload, run_directory: RunDirectory, *, is_resume: bool = False
) -> list[Destination]:
    """Opens all requested destinations; called only on the process that writes files.

    Nothing is lost yet, so what cannot be opened is an error, but for W&B when a run is resumed: its service may be
    down while nobody is there to leave out the flag.

    Args:
        control: whether to write TensorBoard and W&B, and an alternative path of the metrics file.
        workload: sizes for the rates per replica.
        run_directory: the folder of the run, where `metrics.jsonl` goes.
        is_resume: whether the run continues from a checkpoint.

    Raises:
        ConfigError: an optional package is missing, or another run is writing the same file.
        StorageError: the file or the service cannot be opened.
    """
    opened: list[Destination] = []
    with contextlib.ExitStack() as closing:
        opened.append(MetricsFile(control.metrics_file or run_directory.metrics_path))
        closing.callback(opened[0].close)
        if control.tensorboard_dir:
            opened.append(TensorBoard(control.tensorboard_dir, control, workload))
            closing.callback(opened[-1].close)
        if control.wandb_project:
            folder = control.wandb_save_dir or str(run_directory.path)
            try:
                opened.append(
                    WeightsAndBiases(control.wandb_project, control.wandb_exp_name, folder, control.wandb_entity)
                )
            except StorageError as failure:
                if not is_resume:
                    raise
                log.warning(f"{failure} The resumed run goes on without it.")
        closing.pop_all()
    return opened
