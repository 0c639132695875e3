"""Multi-head latent attention (MLA): keys and values from a low-rank latent, which generation caches instead."""

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
    """The widths of multi-head latent attention, and its YaRN factors.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1; flags: NVIDIA Megatron-LM
    `megatron/training/arguments.py`, `_add_mla_args`.
    """

    multi_latent_attention: bool = network_flag(
        False,
        "use multi-head latent attention (MLA); --qk-layernorm normalizes the latents",
    )
    q_lora_rank: int | None = network_flag(
        None, "rank of the query latent; queries are projected from the hidden states if unset", at_least=1
    )
    kv_lora_rank: int = network_flag(32, "rank of the key/value latent", at_least=1)
    qk_head_dim: int = network_flag(128, "channels of a query or key head without RoPE", at_least=1)
    qk_pos_emb_head_dim: int = network_flag(
        64, "channels of a query head with RoPE; the key's are shared by all heads", at_least=2
    )
    v_head_dim: int = network_flag(128, "channels of a value head", at_least=1)
    latent_layernorm_epsilon: float = network_flag(
        help="epsilon of the latent norms; same as --layernorm-epsilon if unset",
        computed=lambda model: model.layernorm_epsilon,
        at_least=SMALLEST_FLOAT32,
        follows=("layernorm_epsilon",),
    )
    mscale: float = network_flag(1.0, "coefficient of YaRN's temperature applied to cos and sin", at_least=0)
    mscale_all_dim: float = network_flag(
        0.0,
        "coefficient of YaRN's temperature applied to the attention scores; cos and sin are divided by it",
        at_least=0,
    )

    @property
    def latent_width(self) -> int:
        """Cached elements per token and layer: the latent, and the rotated part of the keys."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim


def yarn_magnitude(factor: float, weight: float) -> float:
    """YaRN's attention temperature for a context extended by `factor`.

    Source: Peng et al., "YaRN", 2023, equation 22; `weight` as in DeepSeek-V2's code.
    """
    return 0.1 * weight * math.log(factor) + 1.0


def latent_score_factor(model: Any) -> float:
    """YaRN's factor of the attention scores, in addition to 1/sqrt(head width)."""
    if not model.multi_latent_attention or model.rope_scaling_type != "yarn":
        return 1.0
    return yarn_magnitude(model.rope_scaling_factor, model.mscale_all_dim) ** 2


def unused_latent_fields(model: Any) -> dict[str, str]:
    """Fields of this section without effect, with the flag each requires, or "with" the flag that disables it."""
    if not model.multi_latent_attention:
        return dict.fromkeys((*_WIDTHS, *_FACTORS, "latent_layernorm_epsilon"), "--multi-latent-attention")
    unused = dict.fromkeys(("qk_layernorm_scope", "kv_channels"), "with --multi-latent-attention")
    if model.rope_scaling_type != "yarn":
        unused |= dict.fromkeys(_FACTORS, "--rope-scaling-type yarn")
    if not model.qk_layernorm:
        unused["latent_layernorm_epsilon"] = "--qk-layernorm"
    return unused
