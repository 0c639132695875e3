"""DeepSeek V2 and V3: latent attention, routed and shared experts in all layers except the first few.

V2 weights experts by their probabilities, V3 by sigmoids, selected with a load-dependent bias.
Kimi K2 and other models with V3's architecture have its `model_type`.

The norms of the latents have a fixed epsilon without a field. V3's files may have a layer for multi-token prediction,
which `transformers` and an import ignore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from trident.convert.hugging_face.families.llama import (
    FEED_FORWARD_TENSORS,
    OUTER_TENSORS,
    PRE_NORM_TENSORS,
    SHARED_FIELDS,
    THEIR_LAYER,
)
from trident.convert.hugging_face.table.config_fields import (
    Entries,
    FieldRule,
    attention_biases,
    constant,
    irrelevant,
    mapped,
    only,
    same,
    tied_head,
)
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.rope import rope_fields
from trident.convert.hugging_face.table.tensors import (
    OUR_LAYER,
    TensorMapping,
    experts,
    gate_and_up,
    linear,
    matrix,
    norm,
    vector,
)

_LATENT_EPSILON = 1e-6


def _read_query_rank(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    rank = entries.take("q_lora_rank", None if entries.is_null("q_lora_rank") else 1536)
    if rank is not None and type(rank) is not int:
        raise entries.refused("q_lora_rank", rank, "should be an integer")
    return {"q_lora_rank": rank}


def _shared_experts(default: int, default_width: int) -> FieldRule:
    """The rule for the shared experts, which are one network with their total width."""

    def read(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
        width, count = entries.take("moe_intermediate_size", default_width), entries.take("n_shared_experts", default)
        if type(width) is not int or type(count) is not int or count < 1:
            raise entries.refused("n_shared_experts", count, "should be a number of experts of moe_intermediate_size")
        return {"moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": count * width}

    def write(model: ModelConfig) -> dict[str, Any]:
        width = model.moe_ffn_hidden_size
        return {
            "moe_intermediate_size": width,
            "n_shared_experts": model.moe_shared_expert_intermediate_size // width,
        }

    return FieldRule(read, write)


def _expert_layers(default: int) -> FieldRule:
    """The rule for the dense first layers."""

    def read(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
        entries.check_only("moe_layer_freq", (1,))
        dense, layers = entries.take("first_k_dense_replace", default), fields["num_layers"]
        if type(dense) is not int or not 0 <= dense < layers:
            raise entries.refused("first_k_dense_replace", dense, f"should be fewer than the {layers} layers")
        return {"moe_layer_pattern": (0,) * dense + (1,) * (layers - dense) if dense else ()}

    def write(model: ModelConfig) -> dict[str, Any]:
        dense = sum(not model.has_experts(layer) for layer in range(model.num_layers))
        return {"first_k_dense_replace": dense, "moe_layer_freq": 1}

    return FieldRule(read, write)


def _groups(scored: int, limited: str, unlimited: str, defaults: tuple[int | None, int | None]) -> FieldRule:
    """The rule for groups of experts.

    Args:
        scored: number of best experts whose scores rank a group.
        limited: the method with groups.
        unlimited: the method without groups, or with one.
        defaults: numbers of groups, and of groups per token.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
        entries.check_only("topk_method", (limited, unlimited))
        is_limited = entries.take("topk_method", unlimited) == limited
        groups, selected = entries.take("n_group", defaults[0]), entries.take("topk_group", defaults[1])
        if groups in (None, 1) or not is_limited:
            return {"moe_router_num_groups": None}
        return {
            "moe_router_num_groups": groups,
            "moe_router_group_topk": selected,
            "moe_router_group_scored_experts": scored,
        }

    def write(model: ModelConfig) -> dict[str, Any]:
        groups = model.moe_router_num_groups
        return {
            "n_group": groups or 1,
            "topk_group": model.moe_router_group_topk or 1,
            "topk_method": unlimited if groups is None else limited,
        }

    return FieldRule(read, write)


# Fields of both V2 and V3.
_FIELDS: tuple[FieldRule, ...] = (
    *(rule for rule in SHARED_FIELDS if rule.names[0] != "kv_channels"),
    constant(multi_latent_attention=True, qk_layernorm=True, latent_layernorm_epsilon=_LATENT_EPSILON),
    FieldRule(_read_query_rank, lambda model: {"q_lora_rank": model.q_lora_rank}),
    same("kv_lora_rank", "kv_lora_rank", 512),
    same("qk_head_dim", "qk_nope_head_dim", 128),
    same("qk_pos_emb_head_dim", "qk_rope_head_dim", 64),
    same("v_head_dim", "v_head_dim", 128),
    attention_biases(),
    rope_fields(),
    tied_head(default=False),
    only("pretraining_tp", 1),
    irrelevant("head_dim", "qk_head_dim", "output_router_logits", "ep_size", "seq_aux"),
)

_OURS, _THEIRS = OUR_LAYER + "self_attention.", THEIR_LAYER + "self_attn."
_TENSORS: tuple[TensorMapping, ...] = (
    *OUTER_TENSORS,
    *linear(_OURS + "linear_q_proj", _THEIRS + "q_proj"),
    *linear(_OURS + "linear_q_down_proj", _THEIRS + "q_a_proj"),
    *norm(_OURS + "q_layernorm", _THEIRS + "q_a_layernorm"),
    *linear(_OURS + "linear_q_up_proj", _THEIRS + "q_b_proj"),
    *linear(_OURS + "linear_kv_down_proj", _THEIRS + "kv_a_proj_with_mqa"),
    *norm(_OURS + "kv_layernorm", _THEIRS + "kv_a_layernorm"),
    *linear(_OURS + "linear_kv_up_proj", _THEIRS + "kv_b_proj"),
    *linear(_OURS + "linear_proj", _THEIRS + "o_proj"),
    *FEED_FORWARD_TENSORS,
    *experts(THEIR_LAYER + "mlp", "gate_proj", "up_proj", "down_proj"),
    *gate_and_up(
        OUR_LAYER + "mlp.shared_experts.linear_fc1",
        THEIR_LAYER + "mlp.shared_experts.gate_proj",
        THEIR_LAYER + "mlp.shared_experts.up_proj",
    ),
    matrix(OUR_LAYER + "mlp.shared_experts.linear_fc2.weight", THEIR_LAYER + "mlp.shared_experts.down_proj.weight"),
    *PRE_NORM_TENSORS,
)

# Source: transformers `models/deepseek_v2/configuration_deepseek_v2.py` and `modeling_deepseek_v2.py`; field names of
# published files: DeepSeek-AI's own `configuration_deepseek.py`.
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    fields=(
        *_FIELDS,
        constant(rotary_interleaved=True, moe_router_score_function="softmax", moe_router_pre_softmax=True),
        same("num_experts", "n_routed_experts", 64, also=("num_experts",)),
        same("moe_router_topk", "num_experts_per_tok"),
        same("moe_router_topk_scaling_factor", "routed_scaling_factor", 1.0),
        same("moe_aux_loss_coeff", "aux_loss_alpha", 0.001),
        _shared_experts(2, 1407),
        _expert_layers(0),
        _groups(1, "group_limited_greedy", "greedy", (None, None)),
        only("norm_topk_prob", False),  # transformers does not read it
        only("scoring_func", "softmax"),
        only("mlp_bias", False),
    ),
    tensors=_TENSORS,
)

# Source: transformers `models/deepseek_v3/configuration_deepseek_v3.py` and `modeling_deepseek_v3.py`.
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields=(
        *_FIELDS,
        constant(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
        same("rotary_interleaved", "rope_interleave", True),
        same("num_experts", "n_routed_experts", 256, also=("num_local_experts",)),
        same("moe_router_topk", "num_experts_per_tok", 8),
        same("moe_router_topk_scaling_factor", "routed_scaling_factor", 2.5),
        mapped("moe_router_keep_scores", "norm_topk_prob", ((True, False), (False, True)), True),
        _shared_experts(1, 2048),
        _expert_layers(3),
        _groups(2, "noaux_tc", "noaux_tc", (8, 4)),
        only("scoring_func", "sigmoid"),
        irrelevant("aux_loss_alpha", "num_mtp_layers"),
        FieldRule(
            lambda entries, fields: entries.skip("num_nextn_predict_layers"),
            lambda model: {"num_nextn_predict_layers": 0},
        ),
    ),
    tensors=(
        *_TENSORS,
        vector(OUR_LAYER + "mlp.router.expert_bias", THEIR_LAYER + "mlp.gate.e_score_correction_bias", is_state=True),
    ),
    later_layers=THEIR_LAYER,
)
