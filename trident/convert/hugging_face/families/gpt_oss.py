"""gpt-oss: attention sinks, windows in every second block, and experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trident.convert.hugging_face.families.llama import (
    ATTENTION_TENSORS,
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
    only,
    same,
    tied_head,
)
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.rope import read_parameters, rope_fields
from trident.convert.hugging_face.table.tensors import OUR_LAYER, stacked_experts, vector
from trident.convert.hugging_face.table.windows import layered_window

_THETA = 150000.0
_DEFAULT_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read_rotation(entries: Entries, fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if entries.has("rope_parameters") or entries.has("rope_scaling"):
        return rope_fields(_THETA).read(entries, fields)
    parameters = {**_DEFAULT_ROPE, "rope_theta": entries.take("rope_theta", _THETA)}
    return {"position_embedding_type": "rope", **read_parameters(parameters, "rope_parameters", fields)}


def _check_quantization(entries: Entries, fields: Mapping[str, Any]) -> None:
    given = entries.take("quantization_config", {})
    if given and (not isinstance(given, Mapping) or given.get("quant_method") != "mxfp4"):
        why = "is supported only as mxfp4; dequantize the model with transformers and save it"
        raise entries.refused("quantization_config", given, why)


# Source: transformers `models/gpt_oss/configuration_gpt_oss.py` and `modeling_gpt_oss.py`.
GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=(
        *SHARED_FIELDS,
        same("kv_channels", "head_dim", 64),
        same("num_query_groups", "num_key_value_heads", 8),
        same("layernorm_epsilon", "rms_norm_eps", 1e-5),
        same("moe_ffn_hidden_size", "intermediate_size"),
        same("num_experts", "num_local_experts", 128, also=("num_experts",)),
        same("moe_router_topk", "num_experts_per_tok", 4, also=("experts_per_token",)),
        same("moe_aux_loss_coeff", "router_aux_loss_coef", 0.001),
        attention_biases(default=True),
        constant(softmax_type="learnable", moe_router_pre_softmax=False, moe_router_bias=True, moe_mlp_bias=True),
        only("hidden_act", "silu"),  # not the activation of its experts
        constant(activation_function="quick_gelu", glu_linear_offset=1.0),
        same("activation_func_clamp_value", "swiglu_limit", 7.0),
        only("attention_dropout", 0.0),  # not supported with sinks
        only("swiglu_alpha", 1.702, is_written=False),
        FieldRule(_read_rotation, rope_fields(_THETA).write),
        layered_window(2, default=128),
        tied_head(default=False),
        FieldRule(_check_quantization),
        irrelevant("output_router_logits", "initial_context_length"),
    ),
    tensors=(
        *OUTER_TENSORS,
        *ATTENTION_TENSORS,
        vector(OUR_LAYER + "self_attention.softmax_offset", THEIR_LAYER + "self_attn.sinks"),
        *PRE_NORM_TENSORS,
        *stacked_experts(THEIR_LAYER + "mlp"),
    ),
)
