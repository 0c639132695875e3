"""Attention flags: heads, query groups, sliding windows, soft caps and biases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.config.architecture.latent_attention import latent_score_factor
from megatron.config.flags.fields import flag, network_flag
from megatron.config.flags.section import ConfigSection
from megatron.errors import ConfigError

# Extra term of the softmax denominator: none, a logit of 0, a learned logit per head.
VANILLA, OFF_BY_ONE, LEARNABLE = "vanilla", "off-by-one", "learnable"
_LARGEST_POWER = 6


def _head_width(model: Any) -> int:
    if model.multi_latent_attention:
        return model.qk_head_dim + model.qk_pos_emb_head_dim
    heads = model.num_attention_heads
    if heads < 1 or model.hidden_size % heads:
        multiple = -(-model.hidden_size // max(1, heads)) * max(1, heads)
        raise ConfigError(
            f"--hidden-size {model.hidden_size} is not divisible by --num-attention-heads {heads}. "
            f"Use --hidden-size {multiple}, or set --kv-channels."
        )
    return model.hidden_size // heads


def _softmax_scale(model: Any) -> float | None:
    """Default softmax scale: sqrt(base head width) / head width with muP, times YaRN's factor with latent attention.

    Source: Yang et al., "Tensor programs V", 2022, definition 4.1, with NVIDIA Megatron-LM's base width and power.
    """
    yarn_factor = latent_score_factor(model)
    if not isinstance(model.kv_channels, int) or model.kv_channels < 1:
        return None
    if not model.use_mup:
        return None if yarn_factor == 1 else yarn_factor / math.sqrt(model.kv_channels)
    power = min(model.mup_attn_scale_power, _LARGEST_POWER)  # larger values are refused, and would overflow here
    return float(yarn_factor * math.sqrt(model.mup_base_head_dim or 1.0) / model.kv_channels**power)


@dataclass(frozen=True)
class AttentionFields(ConfigSection):
    """Shape and scores of attention."""

    num_layers: int = network_flag(help="number of transformer layers", at_least=1, at_most=10_000)
    hidden_size: int = network_flag(help="transformer hidden size", at_least=1, at_most=2**24)
    num_attention_heads: int = network_flag(help="number of attention heads", at_least=1, at_most=2**20)
    num_query_groups: int = network_flag(
        help="number of key/value heads for grouped-query attention; --num-attention-heads if unset",
        computed=lambda model: model.num_attention_heads,
        at_least=1,
        follows=("num_attention_heads",),
        spelled=("--num-key-value-heads",),
    )
    kv_channels: int = network_flag(
        help="size of an attention head; hidden size / heads if unset, derived with --multi-latent-attention",
        computed=_head_width,
        at_least=1,
        at_most=2**20,
        follows=("hidden_size", "num_attention_heads", "multi_latent_attention", "qk_head_dim", "qk_pos_emb_head_dim"),
    )
    add_bias_linear: bool = network_flag(
        True, "biases in linear layers; --add-qkv-bias, --attention-output-bias and --mlp-bias override it"
    )
    add_qkv_bias: bool = network_flag(
        help="bias in the QKV projection; same as --add-bias-linear if unset",
        computed=lambda model: model.add_bias_linear,
    )
    attention_output_bias: bool = network_flag(
        help="bias in the attention output projection; same as --add-bias-linear if unset",
        computed=lambda model: model.add_bias_linear,
    )
    attention_output_gate: bool = network_flag(
        False, "gate the attention output with the sigmoid of a projection of its input, before the output projection"
    )
    qk_layernorm: bool = network_flag(False, "normalize queries and keys, before RoPE")
    qk_layernorm_scope: str = network_flag(
        "head",
        "channels that --qk-layernorm normalizes together: of one head, or of all heads",
        choices=("head", "all"),
    )
    attention_window: int | None = network_flag(
        None, "sliding window in tokens, the token itself included; full attention if unset", at_least=1
    )
    attention_window_pattern: tuple[int, ...] = network_flag(
        (),
        "1 for layers with the window, 0 for full attention, repeated over the layers; all 1 if unset",
        choices=(0, 1),
    )
    softmax_scale: float | None = network_flag(
        help="scale of the attention scores; 1/sqrt(head width) if unset, set by the --mup flags with --use-mup",
        computed=_softmax_scale,
        above=0,
        follows=("use_mup", "mup_base_head_dim", "mup_attn_scale_power", "kv_channels", "mscale_all_dim"),
    )
    attention_logit_softcap: float | None = network_flag(
        None, "soft cap of the attention scores: c * tanh(score / c)", above=0
    )
    softmax_type: str = network_flag(
        VANILLA,
        "extra term of the softmax denominator: none, 1, or a learned sink per head",
        choices=(VANILLA, OFF_BY_ONE, LEARNABLE),
    )
    attention_dropout: float = flag(0.1, "dropout probability of attention weights", at_least=0, below=1)
