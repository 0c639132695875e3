"""Log lines common to all styles of `megatron.observe.styles`, and the protocol of a style.

Pure functions from values to text. Users' scripts parse these lines, so fields, order and number formats are
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
    """The results of a task with their standard errors, between two lines of dashes.

    Args:
        prefix: the point in training, such as "iteration 100".
    """
    results = [
        f"{metric}: {value:.4f}" + (f" +- {task.errors[metric]:.4f}" if metric in task.errors else "")
        for metric, value in task.figures.items()
    ]
    text = " | ".join([f"task {task.name} at {prefix}", *results, f"items: {task.count}"]) + " | "
    dashes = "-" * (len(text) + 1)
    return [dashes, text, dashes]


def perplexity(loss: float) -> float:
    """exp(loss), capped at exp(20) as upstream does."""
    return math.exp(min(loss, 20.0))


def shown_loss(loss: float | None, form: str) -> str:
    """Formats a loss; "none" if no token counts."""
    return "none" if loss is None else format(loss, form)


def size_line(tp_rank: int, pp_rank: int, parameters: int, parameters_without_embeddings: int) -> str:
    """The size of the network in billions of parameters, with and without embeddings."""
    return f"[{tp_rank:03d}-{pp_rank:03d}] {parameters / 1e9:.4f}B / {parameters_without_embeddings / 1e9:.4f}B"


def trained_line(trained: int, parameters: int) -> str:
    """The trained parameters of a partly frozen network."""
    share = 100 * trained / max(1, parameters)
    return f"trained parameters: {trained:,} of {parameters:,} ({share:.1f} %); the others are frozen (--freeze)"


def argument_lines(values: Mapping[str, Any]) -> list[str]:
    """All arguments with their values, sorted case-insensitively, between a header and a footer line."""
    lines = ["------------------------ arguments ------------------------"]
    for name in sorted(values, key=lambda name: (name.lower(), name)):
        lines.append(f"  {name} {'.' * (48 - len(name))} {values[name]}")
    lines.append("-------------------- end of arguments ---------------------")
    return lines


@dataclass(frozen=True)
class LogPosition:
    """The position of a printed line in a run.

    Attributes:
        step: completed steps.
        train_iterations: planned steps of the run.
        epoch: epoch of the last sample, from 0.
        seconds_left: estimated time to the end of the run, including evaluations and saves; None before a step was
            timed.
    """

    step: int
    train_iterations: int
    epoch: int = 0
    seconds_left: float | None = None


class LineStyle(Protocol):
    """The lines of steps, evaluations and saves; no line where a sequence is empty.

    Attributes:
        LOSS_TAGS: TensorBoard tags of the training and the validation loss, in addition to upstream's.
    """

    SAVE_LINES: SaveLines
    LOSS_TAGS: tuple[str, str] | None

    def iteration_lines(self, metrics: StepMetrics, position: LogPosition) -> Sequence[str]:
        """The lines of a log interval.

        Args:
            metrics: the mean over the steps of the interval; without a loss if no token counts.
        """

    def evaluation_lines(self, group: str, prefix: str, loss: float, position: LogPosition) -> Sequence[str]:
        """The result of one evaluation.

        Args:
            group: name of the data group; `valid` or `test` by default.
            prefix: the point in training, such as "iteration 100".
            loss: mean loss per token, in nats.
        """
