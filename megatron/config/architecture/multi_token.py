"""Multi-token prediction (MTP): extra blocks that predict tokens after the next one."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag, network_flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class MultiTokenFields(ConfigSection):
    """The number of blocks, and the weight of their losses.

    Source of the flags: NVIDIA Megatron-LM `megatron/training/arguments.py`.
    """

    mtp_num_layers: int = network_flag(
        0,
        "number of multi-token prediction (MTP) blocks; block k predicts the token k positions after the next one",
        at_least=0,
        at_most=64,
    )
    mtp_loss_scaling_factor: float = flag(
        0.1, "scaling factor of the mean MTP loss, which is added to the main loss", at_least=0
    )
