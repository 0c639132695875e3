"""Qwen 2 to 3: Llama with a sliding window in later layers, and biases or norms of queries and keys.

Qwen 2 and 2.5 have biases of queries, keys and values. Qwen 3 normalizes queries and keys within each head and sets the
head size explicitly; its MoE variant has experts in all or some layers, with or without normalized weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from trident.convert.hugging_face.families.llama import LLAMA, QUERY_KEY_NORM_TENSORS, SHARED_FIELDS, THEIR_LAYER
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
from trident.convert.hugging_face.table.tensors import experts
from trident.convert.hugging_face.table.windows import shortest, switched_window

# Source: transformers `models/qwen2/configuration_qwen2.py` and `modeling_qwen2.py`.
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=(
        *SHARED_FIELDS,
        constant(add_bias_linear=False, add_qkv_bias=True),  # without a field
        rope_fields(),
        switched_window(),
        tied_head(default=False),
        only("use_mrope", False, is_written=False),
    ),
    tensors=LLAMA.tensors,
)


# Source: transformers `models/qwen3/configuration_qwen3.py` and `modeling_qwen3.py`.
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=(
        *SHARED_FIELDS,
        same("kv_channels", "head_dim", 128),
        constant(qk_layernorm=True, qk_layernorm_scope="head"),
        attention_biases(),
        rope_fields(),
        switched_window(),
        tied_head(default=False),
    ),
    tensors=(*LLAMA.tensors, *QUERY_KEY_NORM_TENSORS),
)


def _read_expert_layers(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    step = entries.positive("decoder_sparse_step", 1, (int,), "a number of layers")
    dense = entries.take("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise entries.refused("mlp_only_layers", dense, "should be a list of layers")
    layers = range(fields["num_layers"])
    pattern = tuple(int(layer not in dense and (layer + 1) % step == 0) for layer in layers)
    if not any(pattern):
        raise entries.refused("mlp_only_layers", dense, "leaves no layer with experts; such a model is a qwen3 model")
    return {"moe_layer_pattern": () if all(pattern) else shortest(pattern)}


def _write_expert_layers(model: ModelConfig) -> dict[str, Any]:
    dense = [layer for layer in range(model.num_layers) if not model.has_experts(layer)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


# Source: transformers `models/qwen3_moe/configuration_qwen3_moe.py` and `modeling_qwen3_moe.py`.
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(
        *SHARED_FIELDS,
        constant(qk_layernorm=True, qk_layernorm_scope="head"),
        attention_biases(),
        same("num_experts", "num_experts", 128, also=("num_local_experts",)),
        same("moe_ffn_hidden_size", "moe_intermediate_size", 768),
        same("moe_router_topk", "num_experts_per_tok", 8),
        mapped("moe_router_pre_softmax", "norm_topk_prob", ((True, False), (False, True)), False),
        same("moe_aux_loss_coeff", "router_aux_loss_coef", 0.001),
        FieldRule(_read_expert_layers, _write_expert_layers),
        rope_fields(),
        switched_window(by_layer=False),
        tied_head(default=False),
        irrelevant("output_router_logits"),
    ),
    tensors=(*QWEN3.tensors, *experts(THEIR_LAYER + "mlp", "gate_proj", "up_proj", "down_proj")),
)
