"""One `Metrics` record a step goes in; console, `metrics.jsonl`, TensorBoard and W&B come out.

The console line is the last rank's, as upstream's is. Files are written by one process only, so that all files of a run
lie on one machine; which one is decided where the report is opened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.config import ControlConfig, OptimConfig
from megatron.config.schedule import planned_iterations
from megatron.observe.console import evaluation_lines, iteration_line
from megatron.observe.metrics import Interval, Metrics, StepOutcome, Workload, measure
from megatron.observe.metrics_file import MetricsFile
from megatron.observe.run_directory import RunDirectory
from megatron.observe.tensorboard import TensorBoard
from megatron.observe.weights_and_biases import WeightsAndBiases


class Destination(Protocol):
    """Where figures go besides the console."""

    def start(self, progress: Progress, arguments: Mapping[str, Any]) -> None:
        """The program starts or resumes here."""

    def step(self, metrics: Metrics) -> None:
        """One step was trained."""

    def interval(self, metrics: Metrics) -> None:
        """A log interval is over."""

    def evaluation(self, progress: Progress, group: str, loss: float) -> None:
        """A data group was evaluated."""

    def close(self) -> None:
        """The run is over."""


class Report:
    """Takes what happens in the loop and passes it on.

    Args:
        control: the log interval.
        optim: how long the run will be.
        workload: what turns samples into tokens and operations.
        shows_loss_scale: whether there is a loss scale to report (fp16).
        arguments: every argument by name, for the destinations that show them.
        destinations: what is written besides the console; empty on ranks that write nothing.
        source_names: names of the sources of the data whose losses are reported; empty if they are not.
    """

    def __init__(
        self,
        control: ControlConfig,
        optim: OptimConfig,
        workload: Workload,
        *,
        shows_loss_scale: bool = False,
        arguments: Mapping[str, Any] | None = None,
        destinations: Sequence[Destination] = (),
        source_names: Sequence[str] = (),
    ) -> None:
        self.control = control
        self.optim = optim
        self.workload = workload
        self.shows_loss_scale = shows_loss_scale
        self.arguments = dict(arguments or {})
        self.destinations = tuple(destinations)
        self.source_names = tuple(source_names)
        self._interval = Interval()
        self._train_iterations = planned_iterations(optim)

    def started(self, progress: Progress) -> None:
        """Training starts here, or resumes."""
        self._train_iterations = planned_iterations(self.optim, progress.step, progress.consumed_samples)
        for destination in self.destinations:
            destination.start(progress, self.arguments)

    def step(
        self,
        progress: Progress,
        outcome: StepOutcome,
        learning_rate: float,
        seconds: float,
    ) -> Metrics:
        """Reports one step; prints a line when --log-interval says so.

        Args:
            progress: after the step.
            outcome: what the engine returned.
            learning_rate: the rate that was applied.
            seconds: wall time of the step.
        """
        metrics = measure(
            progress,
            outcome,
            self.workload,
            train_iterations=self._train_iterations,
            learning_rate=learning_rate,
            seconds=seconds,
            loss_scale=outcome.loss_scale if self.shows_loss_scale else None,
            source_names=self.source_names,
        )
        for destination in self.destinations:
            destination.step(metrics)
        self._interval.add(metrics)
        if self.control.log_interval and progress.step % self.control.log_interval == 0:
            self.flush()
        return metrics

    def evaluation(self, progress: Progress, group: str, prefix: str, loss: float) -> None:
        """Reports the loss of one data group.

        Args:
            progress: when it was evaluated.
            group: the group's name.
            prefix: when in words, as in "iteration 100".
            loss: mean loss per token, in nats.
        """
        for text in evaluation_lines(group, prefix, loss):
            log.line(text)
        for destination in self.destinations:
            destination.evaluation(progress, group, loss)

    def flush(self) -> None:
        """Prints the steps since the last line, if any; also called when a run ends inside a log interval."""
        metrics = self._interval.close()
        if metrics is None:
            return
        log.line(iteration_line(metrics))
        for destination in self.destinations:
            destination.interval(metrics)

    def close(self) -> None:
        """Prints what is left and closes every destination, also when one of them fails."""
        with contextlib.ExitStack() as closing:
            for destination in reversed(self.destinations):
                closing.callback(destination.close)
            self.flush()
        self.destinations = ()


def open_destinations(control: ControlConfig, workload: Workload, run_directory: RunDirectory) -> list[Destination]:
    """Opens everything that the user asked for; called on the one process that writes files.

    Args:
        control: which of TensorBoard and W&B are wanted, and another place for the metrics if one is.
        workload: sizes for the rates per replica.
        run_directory: the folder of the run, where `metrics.jsonl` goes.

    Raises:
        ConfigError: an optional package is missing, or another run writes this file.
        StorageError: the file cannot be opened.
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
            opened.append(WeightsAndBiases(control.wandb_project, control.wandb_exp_name, folder))
        closing.pop_all()
    return opened
