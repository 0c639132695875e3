"""The lines a run prints: pure functions from metrics to text.

Users' scripts parse these lines, so fields, order and number formats are upstream's. There are five additions: tokens
per second, the losses of --log-per-source-loss, the mean over samples of --loss-mean samples, the z-loss of
--z-loss-coeff, and the routing of a network with experts. The loss is always shown; upstream omits it if it is NaN or
not above 0.

Source: bigscience-workshop/Megatron-DeepSpeed, megatron/training.py and megatron/arguments.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.observe.metrics import Metrics, TaskOutcome


def iteration_line(metrics: Metrics) -> str:
    """The line of a log interval, including its leading blank."""
    fields = [
        f" iteration {metrics.iteration:8d}/{metrics.train_iterations:8d}",
        f"consumed samples: {metrics.consumed_samples:12d}",
        f"consumed tokens: {metrics.consumed_tokens:12d}",
        f"elapsed time per iteration (s): {metrics.seconds_per_iteration:.2f}",
        f"learning rate: {metrics.learning_rate:.3E}",
        f"global batch size: {metrics.global_batch_size:5d}",
        f"lm loss: {metrics.lm_loss:.6E}",
    ]
    fields += [f"lm loss {name}: {source.lm_loss:.6E}" for name, source in (metrics.source_losses or {}).items()]
    if metrics.sample_loss is not None:
        fields.append(f"loss per sample: {metrics.sample_loss:.6E}")
    if metrics.z_loss is not None:
        fields.append(f"z loss: {metrics.z_loss:.6E}")
    if metrics.routing is not None:
        fields += [f"{label}: {value:.4f}" for label, value in metrics.routing.by_label.items()]
    if metrics.loss_scale is not None:
        fields.append(f"loss scale: {metrics.loss_scale:.1f}")
    if metrics.gradient_norm is not None:
        fields.append(f"grad norm: {metrics.gradient_norm:.3f}")
    fields += [
        f"number of skipped iterations: {metrics.skipped_iterations:3d}",
        f"number of nan iterations: {metrics.nan_iterations:3d}",
        f"samples per second: {metrics.samples_per_second:.3f}",
        f"tokens per second: {metrics.tokens_per_second:.1f}",
        f"TFLOPs: {metrics.teraflops_per_device:.2f}",
    ]
    return " | ".join(fields) + " |"


def evaluation_lines(group: str, prefix: str, loss: float) -> list[str]:
    """The result of one evaluation between two lines of dashes.

    Args:
        group: name of the data group, `valid` or `test` unless the user named it.
        prefix: the point in training, such as "iteration 100".
        loss: mean loss per token, in nats.
    """
    text = f"{group} loss at {prefix} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    dashes = "-" * (len(text) + 1)
    return [dashes, text, dashes]


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
