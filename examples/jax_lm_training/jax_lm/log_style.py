"""The lines of jax-lm-training, whose users' scripts parse them.

Epochs are counted from 0, as there. The perplexity is exp(loss) of the loss per counted token; there it was
understated, since padding counted as tokens without loss. The remaining time follows the wall clock; there it was twice
too long.

Source: codertimo/jax-lm-training, jax_lm/train.py.
"""

from __future__ import annotations

import math

from megatron.checkpoint.saving import SaveLines
from megatron.objective.metric import StepMetrics
from megatron.observe.console import LogPosition
from megatron.observe.quantities import duration

SAVE_LINES = SaveLines(
    before=lambda step, directory: None,
    after=lambda step, directory: f"save checkpoint to {directory}/",
)
LOSS_TAGS: tuple[str, str] | None = None


def iteration_lines(metrics: StepMetrics, position: LogPosition) -> list[str]:
    """The line of a log interval; without a remaining time where none is known yet."""
    ends_in = ""
    if position.seconds_left is not None:
        ends_in = f" ETA {duration(position.seconds_left)}"
    return [f"[TRAIN] {_place(position)} {_figures(metrics.value('lm_loss'))}{ends_in}"]


def evaluation_lines(group: str, prefix: str, loss: float, position: LogPosition) -> list[str]:
    """The result of one evaluation; it names the data group unless that is the validation data."""
    label = "EVAL" if group == "valid" else f"EVAL {group}"
    return [f"[{label}] {_place(position)} {_figures(loss)}"]


def _place(position: LogPosition) -> str:
    return f"epoch: {position.epoch} step: {position.step}/{position.train_iterations}"


def _figures(loss: float | None) -> str:
    """The loss per token and its exponential, which is infinite where a float cannot hold it."""
    if loss is None:
        return "loss: none"
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    return f"loss: {loss:.4f} ppl: {perplexity:.2f}"
