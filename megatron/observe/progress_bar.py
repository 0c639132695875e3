"""The progress of a run on one line of a terminal: steps, smoothed loss, tokens per second, remaining time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tqdm import tqdm

from megatron import log
from megatron.config import ReportConfig, WatchingConfig
from megatron.device import environment
from megatron.files.progress import ProgressDisplay
from megatron.objective.metric import StepMetrics
from megatron.observe.quantities import duration, short_count

_DECAY = 0.95


class Smoothed:
    """An exponential moving average without the bias towards its start; values that are not finite do not count."""

    def __init__(self, decay: float = _DECAY) -> None:
        self._decay = decay
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self._sum = self._decay * self._sum + (1.0 - self._decay) * value
            self._weight = self._decay * self._weight + 1.0 - self._decay

    @property
    def value(self) -> float | None:
        """The average; None without values."""
        return self._sum / self._weight if self._weight else None


class ProgressBar(ProgressDisplay):
    """Draws the line, at most ten times a second.

    Args:
        show: draws a line.
        clock: seconds from any origin.
        columns: the width of the terminal now.
        has_colour: whether the bar itself is coloured.
    """

    def __init__(
        self,
        show: Callable[[str], None] = log.status,
        clock: Callable[[], float] = time.monotonic,
        columns: Callable[[], int] = lambda: log.terminal_columns("stderr"),
        has_colour: bool = False,
    ) -> None:
        super().__init__(show, show, 0.0, clock)
        self._columns = columns
        self._colour = "green" if has_colour else None
        self._loss, self._seconds, self._tokens = Smoothed(), Smoothed(), Smoothed()
        self._shown_at = -math.inf  # the first step is shown at once

    def step(self, metrics: StepMetrics) -> None:
        """Takes the figures of a step, and draws the line if it is time."""
        loss, seconds = metrics.value("lm_loss"), metrics.value("seconds_per_iteration")
        if loss is not None:
            self._loss.add(loss)
        self._seconds.add(seconds)
        self._tokens.add(metrics.value("tokens_per_second") * seconds)
        if self.is_due() or metrics.value("iteration") >= metrics.value("train_iterations"):
            self.show(self.text(metrics))

    def text(self, metrics: StepMetrics) -> str:
        step, last_step = metrics.value("iteration"), metrics.value("train_iterations")
        figures = [f"{step:,}/{last_step:,}"]
        figures.append("loss nan" if self._loss.value is None else f"loss {self._loss.value:.4f}")
        seconds, tokens = self._seconds.value, self._tokens.value
        if seconds and tokens is not None:
            figures.append(f"{short_count(tokens / seconds)} tokens/s")
        if (utilization := metrics.value("model_flops_utilization_ratio")) is not None:
            figures.append(f"MFU {utilization:.0%}")
        if (seconds_left := metrics.value("eta_seconds")) is not None:
            figures.append(f"{duration(seconds_left)} left")
        return tqdm.format_meter(
            step,
            max(last_step, step),
            0.0,
            ncols=max(1, self._columns() - 1),
            bar_format="{percentage:3.0f}%|{bar}| {figures}",
            ascii=not log.takes_unicode("stderr"),
            colour=self._colour,
            figures=" | ".join(figures),
        )


def wants_bar(watching: WatchingConfig, report: ReportConfig) -> bool:
    """Whether this process shows a bar: its standard error is a terminal that can erase a line, and nothing forbids it.

    The lines of the other styles of --log-style are what other projects' users ask for.
    """
    return (
        watching.progress_bar
        and report.log_style in ("megatron", "short")
        and log.shows_info()
        and log.is_terminal("stderr")
        and environment("TERM", "dumb") != "dumb"
    )


def has_colour() -> bool:
    """Whether the terminal may be given colours.

    Source: https://no-color.org
    """
    return environment("NO_COLOR") is None
