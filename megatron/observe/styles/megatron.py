"""Megatron's lines, the default.

Users' scripts parse them, so fields, order and number formats are upstream's, BERT's sentence-order loss (`sop loss`)
included. There are additions: tokens per second, the losses of --log-per-source-loss, the mean over samples of
--loss-mean samples, the z-loss of --z-loss-coeff, the losses of --mtp-num-layers as Megatron-LM names them, the routing
of a network with experts, the noise scale of --log-gradient-noise-scale, and at the end the utilization of devices
whose peak is known and the remaining time. The loss is always shown; upstream omits it if it is NaN or not above 0.
TFLOPs have more digits where upstream's two would all be 0.

Source: bigscience-workshop/Megatron-DeepSpeed, megatron/training.py and megatron/checkpointing.py.
"""

from __future__ import annotations

import math

from megatron.checkpoint.saving import MEGATRON_LINES
from megatron.observe.console import Moment, perplexity, shown_loss
from megatron.observe.metrics import StepMetrics
from megatron.observe.quantities import duration

SAVE_LINES = MEGATRON_LINES
LOSS_TAGS: tuple[str, str] | None = None


def iteration_lines(metrics: StepMetrics, moment: Moment) -> list[str]:
    """The line of a log interval, including its leading blank."""
    fields = [
        f" iteration {metrics.iteration:8d}/{metrics.train_iterations:8d}",
        f"consumed samples: {metrics.consumed_samples:12d}",
        f"consumed tokens: {metrics.consumed_tokens:12d}",
        f"elapsed time per iteration (s): {metrics.seconds_per_iteration:.2f}",
        f"learning rate: {metrics.learning_rate:.3E}",
        f"global batch size: {metrics.global_batch_size:5d}",
        f"lm loss: {shown_loss(metrics.lm_loss, '.6E')}",
    ]
    fields += [f"lm loss {name}: {source.lm_loss:.6E}" for name, source in (metrics.source_losses or {}).items()]
    if metrics.order_loss is not None:
        fields.append(f"sop loss: {metrics.order_loss:.6E}")
    if metrics.sample_loss is not None:
        fields.append(f"loss per sample: {metrics.sample_loss:.6E}")
    if metrics.distillation_loss is not None:
        fields.append(f"kd loss: {metrics.distillation_loss:.6E}")
    if metrics.z_loss is not None:
        fields.append(f"z loss: {metrics.z_loss:.6E}")
    fields += [f"{depth} loss: {loss:.6E}" for depth, loss in (metrics.mtp_losses or {}).items()]
    if metrics.routing is not None:
        fields += [f"{label}: {value:.4f}" for label, value in metrics.routing.by_label.items()]
    if metrics.loss_scale is not None:
        fields.append(f"loss scale: {metrics.loss_scale:.1f}")
    if metrics.gradient_norm is not None:
        fields.append(f"grad norm: {metrics.gradient_norm:.3f}")
    if metrics.gradient_zeros is not None:
        fields.append(f"num zeros: {metrics.gradient_zeros:.1f}")
    if metrics.weight_norm is not None:
        fields.append(f"params norm: {metrics.weight_norm:.3f}")
    if metrics.noise_scale is not None:
        fields.append(f"noise scale: {metrics.noise_scale:.1f}")
    fields += [
        f"number of skipped iterations: {metrics.skipped_iterations:3d}",
        f"number of nan iterations: {metrics.nan_iterations:3d}",
        *([f"number of empty iterations: {metrics.empty_iterations:3d}"] if metrics.empty_iterations else []),
        f"samples per second: {metrics.samples_per_second:.3f}",
        f"tokens per second: {metrics.tokens_per_second:.1f}",
    ]
    if metrics.teraflops_per_device > 0.0:
        fields.append(f"TFLOPs: {_teraflops(metrics.teraflops_per_device)}")
    if metrics.model_flops_utilization_ratio is not None:
        fields.append(f"MFU: {metrics.model_flops_utilization_ratio:.1%}")
    if moment.seconds_left is not None:
        fields.append(f"ETA: {duration(moment.seconds_left)}")
    return [" | ".join(fields) + " |"]


def evaluation_lines(group: str, prefix: str, loss: float, moment: Moment) -> list[str]:
    """The result of one evaluation between two lines of dashes.

    Args:
        group: name of the data group, `valid` or `test` unless the user named it.
        prefix: the point in training, such as "iteration 100".
        loss: mean loss per token, in nats.
    """
    text = f"{group} loss at {prefix} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    dashes = "-" * (len(text) + 1)
    return [dashes, text, dashes]


def _teraflops(value: float) -> str:
    """Two decimals, and of a smaller figure two digits that are not 0; never with an exponent."""
    decimals = 2 if value >= 0.1 else 1 - math.floor(math.log10(value))
    return f"{value:.{decimals}f}"
