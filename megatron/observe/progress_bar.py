"""A progress bar for a terminal: steps, smoothed loss, tokens per second, remaining time."""

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
    """A bias-corrected exponential moving average; values that are not finite are ignored."""

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
    """Draws the bar, at most ten times a second.

    Args:
        show: draws a line.
        clock: seconds from any origin.
        columns: returns the current width of the terminal.
        has_colour: colour the bar.
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
        """Adds the metrics of a step, and redraws the bar if due."""
        loss, seconds = metrics.value("lm_loss"), metrics.value("seconds_per_iteration")
        if loss is not None:
            self._loss.add(loss)
        self._seconds.add(seconds)
        self._tokens.add(metrics.value("tokens_per_second") * seconds)
        if self.is_due() or metrics.value("iteration") >= metrics.value("train_iterations"):
            self.show(self.text(metrics))

    def text(self, metrics: StepMetrics) -> str:
        step, last_step = metrics.value("iteration"), metrics.value("train_iterations")
        fields = [f"{step:,}/{last_step:,}"]
        fields.append("loss nan" if self._loss.value is None else f"loss {self._loss.value:.4f}")
        seconds, tokens = self._seconds.value, self._tokens.value
        if seconds and tokens is not None:
            fields.append(f"{short_count(tokens / seconds)} tokens/s")
        if (utilization := metrics.value("model_flops_utilization_ratio")) is not None:
            fields.append(f"MFU {utilization:.0%}")
        if (seconds_left := metrics.value("eta_seconds")) is not None:
            fields.append(f"{duration(seconds_left)} left")
        return tqdm.format_meter(
            step,
            max(last_step, step),
            0.0,
            ncols=max(1, self._columns() - 1),
            bar_format="{percentage:3.0f}%|{bar}| {figures}",
            ascii=not log.takes_unicode("stderr"),
            colour=self._colour,
            figures=" | ".join(fields),
        )


def wants_bar(watching: WatchingConfig, report: ReportConfig) -> bool:
    """True if this process shows a bar: flags permit it, and its standard error is a terminal that can erase a line."""
    return (
        watching.progress_bar
        and report.log_style in ("megatron", "short")  # users of the other styles expect those projects' lines
        and log.shows_info()
        and log.is_terminal("stderr")
        and environment("TERM", "dumb") != "dumb"
    )


def has_colour() -> bool:
    """True unless NO_COLOR is set. Source: https://no-color.org"""
    return environment("NO_COLOR") is None
