"""Attention: heads, groups of keys and values, windows, caps and biases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.config.architecture.latent_attention import latent_score_factor
from megatron.config.flags.fields import flag, network_flag
from megatron.config.flags.section import ConfigSection
from megatron.errors import ConfigError

# What the denominator of the softmax has besides its keys: nothing, a logit of 0, a learned logit per head.
VANILLA, OFF_BY_ONE, LEARNABLE = "vanilla", "off-by-one", "learnable"
_LARGEST_POWER = 6


def _head_width(model: Any) -> int:
    """The width of a head that is not given."""
    if model.multi_latent_attention:
        return model.qk_head_dim + model.qk_pos_emb_head_dim
    heads = model.num_attention_heads
    if heads < 1 or model.hidden_size % heads:
        multiple = -(-model.hidden_size // max(1, heads)) * max(1, heads)
        raise ConfigError(
            f"--hidden-size {model.hidden_size} cannot be divided among --num-attention-heads {heads}. The width must "
            f"be a multiple of the heads; use --hidden-size {multiple} or give --kv-channels."
        )
    return model.hidden_size // heads


def _softmax_scale(model: Any) -> float | None:
    """The factor of the scores that is not given: under muP sqrt(base head width) / head width, and what a stretched
    context of latent attention adds.

    Source: Yang et al., "Tensor programs V", 2022, definition 4.1, with NVIDIA Megatron-LM's base width and power.
    """
    stretched = latent_score_factor(model)
    if not isinstance(model.kv_channels, int) or model.kv_channels < 1:
        return None
    if not model.use_mup:
        return None if stretched == 1 else stretched / math.sqrt(model.kv_channels)
    power = min(model.mup_attn_scale_power, _LARGEST_POWER)  # a greater one is refused, and would overflow here
    return float(stretched * math.sqrt(model.mup_base_head_dim or 1.0) / model.kv_channels**power)


@dataclass(frozen=True)
class AttentionFields(ConfigSection):
    """Shape and scores of attention."""

    num_layers: int = network_flag(help="transformer blocks in the whole model", at_least=1, at_most=10_000)
    hidden_size: int = network_flag(help="width of the model", at_least=1, at_most=2**24)
    num_attention_heads: int = network_flag(help="attention heads per block", at_least=1, at_most=2**20)
    num_query_groups: int = network_flag(
        help="groups of query heads that share one key and value head; one per head if unset",
        computed=lambda model: model.num_attention_heads,
        at_least=1,
        follows=("num_attention_heads",),
        spelled=("--num-key-value-heads",),
    )
    kv_channels: int = network_flag(
        help="width of an attention head; hidden size / heads if unset, by its flags with --multi-latent-attention",
        computed=_head_width,
        at_least=1,
        at_most=2**20,
        follows=("hidden_size", "num_attention_heads", "multi_latent_attention", "qk_head_dim", "qk_pos_emb_head_dim"),
    )
    add_bias_linear: bool = network_flag(True, "biases in linear layers; each kind has its own flag")
    add_qkv_bias: bool = network_flag(
        help="biases of queries, keys and values; as --add-bias-linear if unset",
        computed=lambda model: model.add_bias_linear,
    )
    attention_output_bias: bool = network_flag(
        help="bias of the attention's output matrix; as --add-bias-linear if unset",
        computed=lambda model: model.add_bias_linear,
    )
    attention_output_gate: bool = network_flag(
        False, "multiply what attention returns by the sigmoid of a product of its input, before the output matrix"
    )
    qk_layernorm: bool = network_flag(False, "normalize queries and keys before the rotation")
    qk_layernorm_scope: str = network_flag(
        "head", "what is normalized: the channels of a head, or of all heads", choices=("head", "all")
    )
    attention_window: int | None = network_flag(
        None, "tokens a token may attend to, itself included; unlimited if unset", at_least=1
    )
    attention_window_pattern: tuple[int, ...] = network_flag(
        (), "1 for layers with the window, 0 for full attention, repeated over the layers; all if unset", choices=(0, 1)
    )
    softmax_scale: float | None = network_flag(
        help="factor of the attention scores; 1/sqrt(head width) if unset, by the --mup flags with --use-mup",
        computed=_softmax_scale,
        above=0,
        follows=("use_mup", "mup_base_head_dim", "mup_attn_scale_power", "kv_channels", "mscale_all_dim"),
    )
    attention_logit_softcap: float | None = network_flag(
        None, "scores are kept below this by c * tanh(score / c)", above=0
    )
    softmax_type: str = network_flag(
        VANILLA,
        "what the softmax's denominator has besides the keys: nothing, 1, or a learned sink per head",
        choices=(VANILLA, OFF_BY_ONE, LEARNABLE),
    )
    attention_dropout: float = flag(0.1, "dropout on attention probabilities", at_least=0, below=1)
