"""What is minimized beside, or in place of, the plain cross-entropy of the next token."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class LossConfig(ConfigSection):
    """The training loss. Logged and evaluated losses are always the plain cross-entropy."""

    z_loss_coeff: float = flag(
        0.0,
        "coefficient of the z-loss, which adds the squared logarithm of the softmax denominator",
        at_least=0,
        spelled=("--z-loss",),
    )
    label_smoothing: float = flag(
        0.0, "share of the target probability that is spread evenly over the vocabulary", at_least=0, below=1
    )
