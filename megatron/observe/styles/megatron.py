"""Megatron's lines, the default.

Users' scripts parse them, so fields, order and number formats are upstream's, including BERT's sentence-order loss
(`sop loss`). Additions: tokens per second, the losses of --log-per-source-loss, the mean over samples of --loss-mean
samples, the z-loss of --z-loss-coeff, the losses of --mtp-num-layers as Megatron-LM names them, routing statistics of
networks with experts, the noise scale of --log-gradient-noise-scale, and at the end MFU for devices with a known peak
and the remaining time. The loss is always shown; upstream omits it if it is NaN or not above 0. TFLOPs have more digits
if upstream's two would all be 0.

Source: bigscience-workshop/Megatron-DeepSpeed, megatron/training.py and megatron/checkpointing.py.
"""

from __future__ import annotations

import math

from megatron.checkpoint.saving import MEGATRON_LINES
from megatron.objective.metric import StepMetrics
from megatron.observe.console import LogPosition, perplexity
from megatron.observe.names import NAMES, named
from megatron.observe.quantities import duration

SAVE_LINES = MEGATRON_LINES
LOSS_TAGS: tuple[str, str] | None = None
_LOSS_INDEX = 1 + list(NAMES).index("lm_loss")  # in the line; the fields before it are always present


def iteration_lines(metrics: StepMetrics, position: LogPosition) -> list[str]:
    """The line of a log interval, including its leading blank."""
    fields = [f" iteration {metrics.value('iteration'):8d}/{metrics.value('train_iterations'):8d}"]
    fields += [field for field, _ in named(metrics, "line")]
    if metrics.value("lm_loss") is None:
        fields.insert(_LOSS_INDEX, "lm loss: none")
    if metrics.value("teraflops_per_device") > 0.0:
        fields.append(f"TFLOPs: {_teraflops(metrics.value('teraflops_per_device'))}")
    if metrics.value("model_flops_utilization_ratio") is not None:
        fields.append(f"MFU: {metrics.value('model_flops_utilization_ratio'):.1%}")
    if position.seconds_left is not None:
        fields.append(f"ETA: {duration(position.seconds_left)}")
    return [" | ".join(fields) + " |"]


def evaluation_lines(group: str, prefix: str, loss: float, position: LogPosition) -> list[str]:
    """The result of one evaluation between two lines of dashes.

    Args:
        group: name of the data group; `valid` or `test` by default.
        prefix: the point in training, such as "iteration 100".
        loss: mean loss per token, in nats.
    """
    text = f"{group} loss at {prefix} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    dashes = "-" * (len(text) + 1)
    return [dashes, text, dashes]


def _teraflops(value: float) -> str:
    """Two decimals, or two significant digits of a smaller value; never with an exponent."""
    decimals = 2 if value >= 0.1 else 1 - math.floor(math.log10(value))
    return f"{value:.{decimals}f}"
