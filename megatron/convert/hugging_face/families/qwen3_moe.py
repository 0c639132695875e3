"""Qwen 3 with experts in all or some layers; their weights sum to one or are left as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.convert.hugging_face.families.llama import IGNORED_TENSORS, OUR_LAYER, SHARED_FIELDS, THEIR_LAYER
from megatron.convert.hugging_face.families.qwen3 import ATTENTION_BIASES, QWEN3
from megatron.convert.hugging_face.table.family import Family
from megatron.convert.hugging_face.table.fields import (
    Constant,
    Entries,
    Functions,
    Irrelevant,
    Mapped,
    Same,
    tied_head,
)
from megatron.convert.hugging_face.table.rope import rope_fields
from megatron.convert.hugging_face.table.tensors import expert_gate_and_up, expert_matrix, matrix
from megatron.convert.hugging_face.table.windows import shortest, switched_window

_EXPERT = THEIR_LAYER + "mlp.experts.{expert}."


def _read_expert_layers(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    step = entries.take("decoder_sparse_step", 1)
    if type(step) is not int or step < 1:
        raise entries.refused("decoder_sparse_step", step, "should be a number of layers")
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
        Constant({"qk_layernorm": True, "qk_layernorm_scope": "head"}),
        ATTENTION_BIASES,
        Same("num_experts", "num_experts", 128, also=("num_local_experts",)),
        Same("moe_ffn_hidden_size", "moe_intermediate_size", 768),
        Same("moe_router_topk", "num_experts_per_tok", 8),
        Mapped("moe_router_pre_softmax", "norm_topk_prob", ((True, False), (False, True)), False),
        Same("moe_aux_loss_coeff", "router_aux_loss_coef", 0.001),
        Functions(_read_expert_layers, _write_expert_layers),
        rope_fields(),
        switched_window(by_layer=False),
        tied_head(default=False),
        Irrelevant(("output_router_logits",)),
    ),
    tensors=(
        *QWEN3.tensors,
        matrix(OUR_LAYER + "mlp.router.weight", THEIR_LAYER + "mlp.gate.weight"),
        expert_gate_and_up(
            OUR_LAYER + "mlp.experts.linear_fc1.weight", _EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"
        ),
        expert_matrix(OUR_LAYER + "mlp.experts.linear_fc2.weight", _EXPERT + "down_proj.weight"),
    ),
    ignored_tensors=IGNORED_TENSORS,
)
