"""Mistral: Llama without biases, with a sliding window in all layers; Mixtral: with experts in every layer."""

from __future__ import annotations

from trident.convert.hugging_face.families.llama import (
    ATTENTION_TENSORS,
    LLAMA,
    OUTER_TENSORS,
    PRE_NORM_TENSORS,
    SHARED_FIELDS,
    THEIR_LAYER,
)
from trident.convert.hugging_face.table.config_fields import constant, irrelevant, only, same, tied_head
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.rope import rope_fields
from trident.convert.hugging_face.table.tensors import experts
from trident.convert.hugging_face.table.windows import window_of_all_layers

# Source: transformers `models/mistral/configuration_mistral.py` and `modeling_mistral.py`.
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=(
        *SHARED_FIELDS,
        constant(add_bias_linear=False),
        rope_fields(),
        window_of_all_layers(default=4096),
        tied_head(default=False),
    ),
    tensors=LLAMA.tensors,
)


# Source: transformers `models/mixtral/configuration_mixtral.py` and `modeling_mixtral.py`.
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=(
        *SHARED_FIELDS,
        same("layernorm_epsilon", "rms_norm_eps", 1e-5),
        same("moe_ffn_hidden_size", "intermediate_size"),
        same("num_experts", "num_local_experts", 8, also=("num_experts",)),
        same("moe_router_topk", "num_experts_per_tok", 2),
        same("moe_aux_loss_coeff", "router_aux_loss_coef", 0.001),
        constant(add_bias_linear=False, moe_router_pre_softmax=False),
        rope_fields(default_theta=1_000_000.0),
        window_of_all_layers(),
        tied_head(default=False),
        only("router_jitter_noise", 0.0),
        irrelevant("output_router_logits"),
    ),
    tensors=(
        *OUTER_TENSORS,
        *ATTENTION_TENSORS,
        *PRE_NORM_TENSORS,
        *experts(THEIR_LAYER + "block_sparse_moe", "w1", "w3", "w2"),
    ),
)
