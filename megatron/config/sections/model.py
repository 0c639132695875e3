"""The architecture: what a checkpoint must match, and nothing about how the network is trained."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config.architecture.feed_forward import ExpertFields
from megatron.config.architecture.latent_attention import idle_latent_fields
from megatron.config.architecture.multi_token import MultiTokenFields
from megatron.config.architecture.norms import NormFields
from megatron.config.architecture.scales import ScaleFields
from megatron.config.flags.fields import MUST_MATCH, derived, flags_of, network_flag


@dataclass(frozen=True)
class ModelRequest(ScaleFields, NormFields, MultiTokenFields, ExpertFields):
    """The architecture that was asked for."""

    vocab_size: int | None = network_flag(
        None, "entries of the network's vocabulary; the tokenizer's tokens if unset", at_least=1, at_most=2**31 - 1
    )


@dataclass(frozen=True)
class ModelConfig(ModelRequest):
    """The architecture with the size of its vocabulary, as every layer sees it."""

    vocab_size: int = derived("entries of the network's vocabulary", resume=MUST_MATCH)
    padded_vocab_size: int = derived("rows of the word embedding over all tensor-parallel ranks")


# The scalings of the rotation frequencies that read a field.
_SCALINGS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "rope_scaling_factor": ("linear", "dynamic", "llama3", "yarn"),
        "rope_original_max_positions": ("dynamic", "llama3", "yarn", "longrope"),
        "rope_low_freq_factor": ("llama3",),
        "rope_high_freq_factor": ("llama3",),
        "rope_beta_fast": ("yarn",),
        "rope_beta_slow": ("yarn",),
        "yarn_correction_range_round_to_int": ("yarn",),
        "rope_attention_factor": ("yarn", "longrope"),
        "rope_short_factors": ("longrope",),
        "rope_long_factors": ("longrope",),
    }
)


def idle_fields(model: ModelRequest) -> dict[str, str]:
    """The fields that change nothing in this network, each with what they would need, or "with" what is to blame."""
    names = [flag.field for flag in flags_of(ModelRequest)]
    idle: dict[str, str] = {}
    if not model.uses_rope:
        rotary = [name for name in names if name.startswith(("rotary_", "rope_", "yarn_"))]
        idle.update(dict.fromkeys(rotary, "rotary positions (--position-embedding-type rope)"))
    for name, kinds in _SCALINGS.items():
        if model.rope_scaling_type not in kinds:
            idle.setdefault(name, f"--rope-scaling-type {' or '.join(kinds)}")
    if model.attention_window is None:
        idle.setdefault("rotary_base_windowed", "--attention-window")
    if not model.gated_linear_unit:
        idle.update(dict.fromkeys(("glu_linear_offset", "activation_func_clamp_value"), "--gated-linear-unit"))
    if not model.qk_layernorm:
        idle["qk_layernorm_scope"] = "--qk-layernorm"
    if not model.drops_tokens:
        capacity = ("moe_eval_capacity_factor", "moe_min_capacity", "moe_token_drop_policy")
        idle.update(dict.fromkeys(capacity, "--moe-expert-capacity-factor"))
    if not model.moe_router_enable_expert_bias:
        idle["moe_router_bias_update_rate"] = "--moe-router-enable-expert-bias"
    if model.moe_router_num_groups is None:
        idle["moe_router_group_scored_experts"] = "--moe-router-num-groups"
    if model.moe_router_score_function == "softmax":
        idle["moe_router_keep_scores"] = "--moe-router-score-function sigmoid"
    elif model.moe_router_topk == 1:
        idle["moe_router_keep_scores"] = "several experts for a token (--moe-router-topk)"
    if model.moe_router_score_function == "sigmoid":
        idle["moe_router_pre_softmax"] = "--moe-router-score-function softmax"
    if model.num_experts == 1:
        idle.update({name: "--num-experts" for name in names if name.startswith("moe_")})
    if not model.mtp_num_layers:
        idle["mtp_loss_scaling_factor"] = "--mtp-num-layers"
    if not model.activation_function.startswith("gelu"):
        idle["openai_gelu"] = "a GELU (--activation-function)"
    return idle | idle_latent_fields(model)
