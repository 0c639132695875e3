"""The lines that a run prints in every style of `megatron.observe.styles`, and what a style consists of.

Pure functions from values to text. Users' scripts parse these lines, so their fields, order and number formats are
upstream's.

Source: bigscience-workshop/Megatron-DeepSpeed, megatron/training.py and megatron/arguments.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.checkpoint.saving import SaveLines
from megatron.objective.metric import StepMetrics
from megatron.observe.metrics import TaskOutcome


def task_lines(task: TaskOutcome, prefix: str) -> list[str]:
    """The figures of one task between two lines of dashes, each with its standard error.

    Args:
        prefix: the point in training, such as "iteration 100".
    """
    figures = [
        f"{metric}: {value:.4f}" + (f" +- {task.errors[metric]:.4f}" if metric in task.errors else "")
        for metric, value in task.figures.items()
    ]
    text = " | ".join([f"task {task.name} at {prefix}", *figures, f"items: {task.count}"]) + " | "
    dashes = "-" * (len(text) + 1)
    return [dashes, text, dashes]


def perplexity(loss: float) -> float:
    """exp(loss), capped at exp(20) as upstream does."""
    return math.exp(min(loss, 20.0))


def shown_loss(loss: float | None, form: str) -> str:
    """A loss in a number format, or "none" where no token counts."""
    return "none" if loss is None else format(loss, form)


def size_line(tp_rank: int, pp_rank: int, parameters: int, parameters_without_embeddings: int) -> str:
    """The size of the network in billions of parameters, with and without embeddings."""
    return f"[{tp_rank:03d}-{pp_rank:03d}] {parameters / 1e9:.4f}B / {parameters_without_embeddings / 1e9:.4f}B"


def trained_line(trained: int, parameters: int) -> str:
    """How much of a partly frozen network is trained."""
    share = 100 * trained / max(1, parameters)
    return f"trained parameters: {trained:,} of {parameters:,} ({share:.1f} %); the others are frozen (--freeze)"


def argument_lines(values: Mapping[str, Any]) -> list[str]:
    """Every argument with its value, sorted by name ignoring case, between a header and a footer line."""
    lines = ["------------------------ arguments ------------------------"]
    for name in sorted(values, key=lambda name: (name.lower(), name)):
        lines.append(f"  {name} {'.' * (48 - len(name))} {values[name]}")
    lines.append("-------------------- end of arguments ---------------------")
    return lines


@dataclass(frozen=True)
class LogPosition:
    """Where a run is when a line is printed.

    Attributes:
        step: steps that are complete.
        train_iterations: planned steps of the run.
        epoch: number of the pass over the training data that the last sample belongs to, from 0.
        seconds_left: estimated time to the end of the run, evaluations and saves included; None before a step was
            timed.
    """

    step: int
    train_iterations: int
    epoch: int = 0
    seconds_left: float | None = None


class LineStyle(Protocol):
    """The lines of steps, evaluations and saves; no line where a sequence is empty.

    Attributes:
        LOSS_TAGS: the TensorBoard tags under which its users look for the training and the validation loss, in
            addition to upstream's.
    """

    SAVE_LINES: SaveLines
    LOSS_TAGS: tuple[str, str] | None

    def iteration_lines(self, metrics: StepMetrics, position: LogPosition) -> Sequence[str]:
        """The lines of a log interval.

        Args:
            metrics: the mean over the interval's steps; it has no loss if none of their tokens counts.
        """

    def evaluation_lines(self, group: str, prefix: str, loss: float, position: LogPosition) -> Sequence[str]:
        """The result of one evaluation.

        Args:
            group: name of the data group, `valid` or `test` unless the user named it.
            prefix: the point in training, such as "iteration 100".
            loss: mean loss per token, in nats.
        """
