"""Multi-token prediction: further blocks that predict the tokens after the next one."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag, network_flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class MultiTokenFields(ConfigSection):
    """The blocks, and the weight of their losses.

    Source of the flags: NVIDIA Megatron-LM `megatron/training/arguments.py`.
    """

    mtp_num_layers: int = network_flag(
        0,
        "blocks of multi-token prediction after the last block: the k-th predicts the token k places after the next "
        "one",
        at_least=0,
        at_most=64,
    )
    mtp_loss_scaling_factor: float = flag(
        0.1, "weight of the mean of the losses of multi-token prediction beside the main loss", at_least=0
    )
