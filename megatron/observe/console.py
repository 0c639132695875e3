"""The lines that a run prints in every style of `megatron.observe.styles`: pure functions from values to text.

Users' scripts parse these lines, so their fields, order and number formats are upstream's.

Source: bigscience-workshop/Megatron-DeepSpeed, megatron/training.py and megatron/arguments.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
