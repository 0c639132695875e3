"""Multi-head latent attention: keys and values from a latent of few channels, which generation keeps in their place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.config.flags.fields import SMALLEST_FLOAT32, network_flag
from megatron.config.flags.section import ConfigSection

_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_FACTORS = ("mscale", "mscale_all_dim")


@dataclass(frozen=True)
class LatentAttentionFields(ConfigSection):
    """The widths of multi-head latent attention, and its factors for stretched contexts.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1; of the flags NVIDIA Megatron-LM
    `megatron/training/arguments.py`, `_add_mla_args`.
    """

    multi_latent_attention: bool = network_flag(
        False,
        "keys and values are made of a latent (MLA), as queries may be; --qk-layernorm normalizes the latents",
    )
    q_lora_rank: int | None = network_flag(
        None, "width of the latent that queries are made of; unset, they are made of the hidden states", at_least=1
    )
    kv_lora_rank: int = network_flag(32, "width of the latent that keys and values are made of", at_least=1)
    qk_head_dim: int = network_flag(128, "channels of a head's queries and keys without positions", at_least=1)
    qk_pos_emb_head_dim: int = network_flag(
        64, "channels of a head's queries that are rotated; all heads share those of the keys", at_least=2
    )
    v_head_dim: int = network_flag(128, "channels of a head's values", at_least=1)
    latent_layernorm_epsilon: float = network_flag(
        help="epsilon of the norms of the latents; as --layernorm-epsilon if unset",
        computed=lambda model: model.layernorm_epsilon,
        at_least=SMALLEST_FLOAT32,
        follows=("layernorm_epsilon",),
    )
    mscale: float = network_flag(1.0, "yarn: weight of the context's stretch in cosine and sine", at_least=0)
    mscale_all_dim: float = network_flag(
        0.0, "yarn: the same in the attention scores; cosine and sine are divided by it", at_least=0
    )

    @property
    def latent_width(self) -> int:
        """Numbers that generation keeps of a token in every layer: the latent, and the rotated part of the keys."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim


def yarn_magnitude(factor: float, weight: float) -> float:
    """What YaRN multiplies by where the context is stretched by a factor.

    Source: Peng et al., "YaRN", 2023, equation 22, with a weight as in DeepSeek-V2's code.
    """
    return 0.1 * weight * math.log(factor) + 1.0


def latent_score_factor(model: Any) -> float:
    """The factor of the attention scores of a stretched context, besides 1/sqrt(head width)."""
    if not model.multi_latent_attention or model.rope_scaling_type != "yarn":
        return 1.0
    return yarn_magnitude(model.rope_scaling_factor, model.mscale_all_dim) ** 2


def unused_latent_fields(model: Any) -> dict[str, str]:
    """The fields of this section that change nothing, each with what they would need or what they do not go with."""
    if not model.multi_latent_attention:
        return dict.fromkeys((*_WIDTHS, *_FACTORS, "latent_layernorm_epsilon"), "--multi-latent-attention")
    idle = dict.fromkeys(("qk_layernorm_scope", "kv_channels"), "with --multi-latent-attention")
    if model.rope_scaling_type != "yarn":
        idle |= dict.fromkeys(_FACTORS, "--rope-scaling-type yarn")
    if not model.qk_layernorm:
        idle["latent_layernorm_epsilon"] = "--qk-layernorm"
    return idle
