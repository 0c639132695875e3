"""Mixtral: Mistral with experts in every layer, whose weights sum to one."""

from __future__ import annotations

from megatron.convert.hugging_face.families.llama import (
    ATTENTION_TENSORS,
    IGNORED_TENSORS,
    OUR_LAYER,
    OUTER_TENSORS,
    PRE_NORM_TENSORS,
    SHARED_FIELDS,
    THEIR_LAYER,
)
from megatron.convert.hugging_face.table.family import Family
from megatron.convert.hugging_face.table.fields import Constant, Irrelevant, Only, Same, tied_head
from megatron.convert.hugging_face.table.rope import rope_fields
from megatron.convert.hugging_face.table.tensors import expert_gate_and_up, expert_matrix, matrix
from megatron.convert.hugging_face.table.windows import window_of_all_layers

_EXPERT = THEIR_LAYER + "block_sparse_moe.experts.{expert}."

# Source: transformers `models/mixtral/configuration_mixtral.py` and `modeling_mixtral.py`.
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=(
        *SHARED_FIELDS,
        Same("layernorm_epsilon", "rms_norm_eps", 1e-5),
        Same("moe_ffn_hidden_size", "intermediate_size"),
        Same("num_experts", "num_local_experts", 8, also=("num_experts",)),
        Same("moe_router_topk", "num_experts_per_tok", 2),
        Same("moe_aux_loss_coeff", "router_aux_loss_coef", 0.001),
        Constant({"add_bias_linear": False, "moe_router_pre_softmax": False}),
        rope_fields(default_theta=1_000_000.0),
        window_of_all_layers(),
        tied_head(default=False),
        Only("router_jitter_noise", (0.0,)),
        Irrelevant(("output_router_logits",)),
    ),
    tensors=(
        *OUTER_TENSORS,
        *ATTENTION_TENSORS,
        *PRE_NORM_TENSORS,
        matrix(OUR_LAYER + "mlp.router.weight", THEIR_LAYER + "block_sparse_moe.gate.weight"),
        expert_gate_and_up(OUR_LAYER + "mlp.experts.linear_fc1.weight", _EXPERT + "w1.weight", _EXPERT + "w3.weight"),
        expert_matrix(OUR_LAYER + "mlp.experts.linear_fc2.weight", _EXPERT + "w2.weight"),
    ),
    ignored_tensors=IGNORED_TENSORS,
)
