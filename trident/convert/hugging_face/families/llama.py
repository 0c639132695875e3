"""Llama 1 to 3: rotary positions with every scaling, RMSNorm, gated feed-forward, grouped queries, optional biases.

Most later families use the same tensor names, and their tables are built from this one.
"""

from __future__ import annotations

from trident.convert.hugging_face.table.config_fields import (
    ACTIVATION_NAMES,
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
    gate_and_up,
    linear,
    matrix,
    norm,
    separate_query_key_value,
)

THEIR_LAYER = "model.layers.{layer}."

# Sizes, norms and the gated activation, with the same names in most families.
SHARED_FIELDS: tuple[FieldRule, ...] = (
    constant(normalization="RMSNorm", gated_linear_unit=True, hidden_dropout=0.0),
    same("vocab_size", "vocab_size"),
    same("num_layers", "num_hidden_layers"),
    same("hidden_size", "hidden_size"),
    same("ffn_hidden_size", "intermediate_size"),
    same("num_attention_heads", "num_attention_heads"),
    same("num_query_groups", "num_key_value_heads", lambda fields: fields["num_attention_heads"]),
    same("kv_channels", "head_dim", lambda fields: fields["hidden_size"] // fields["num_attention_heads"]),
    same("max_position_embeddings", "max_position_embeddings"),
    mapped("activation_function", "hidden_act", ACTIVATION_NAMES, "silu"),
    same("layernorm_epsilon", "rms_norm_eps", 1e-6),
    same("attention_dropout", "attention_dropout", 0.0),
    same("init_method_std", "initializer_range", 0.02),
)

# The embedding, the final norm and the head, with the same names in these families.
OUTER_TENSORS: tuple[TensorMapping, ...] = (
    matrix("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    *norm("decoder.final_layernorm", "model.norm"),
    *linear("output_layer", "lm_head"),
)
ATTENTION_TENSORS: tuple[TensorMapping, ...] = (
    *separate_query_key_value(
        OUR_LAYER + "self_attention.linear_qkv",
        THEIR_LAYER + "self_attn.q_proj",
        THEIR_LAYER + "self_attn.k_proj",
        THEIR_LAYER + "self_attn.v_proj",
    ),
    *linear(OUR_LAYER + "self_attention.linear_proj", THEIR_LAYER + "self_attn.o_proj"),
)
FEED_FORWARD_TENSORS: tuple[TensorMapping, ...] = (
    *gate_and_up(OUR_LAYER + "mlp.linear_fc1", THEIR_LAYER + "mlp.gate_proj", THEIR_LAYER + "mlp.up_proj"),
    *linear(OUR_LAYER + "mlp.linear_fc2", THEIR_LAYER + "mlp.down_proj"),
)
PRE_NORM_TENSORS: tuple[TensorMapping, ...] = (
    *norm(OUR_LAYER + "input_layernorm", THEIR_LAYER + "input_layernorm"),
    *norm(OUR_LAYER + "pre_mlp_layernorm", THEIR_LAYER + "post_attention_layernorm"),
)
QUERY_KEY_NORM_TENSORS: tuple[TensorMapping, ...] = (
    *norm(OUR_LAYER + "self_attention.q_layernorm", THEIR_LAYER + "self_attn.q_norm"),
    *norm(OUR_LAYER + "self_attention.k_layernorm", THEIR_LAYER + "self_attn.k_norm"),
)

# Source: transformers `models/llama/configuration_llama.py` and `modeling_llama.py`.
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(
        *SHARED_FIELDS,
        rope_fields(),
        attention_biases(),
        same("mlp_bias", "mlp_bias", False),
        tied_head(default=False),
        only("pretraining_tp", 1, 2, 4, 8),  # former split of the products; same result
        irrelevant("max_sequence_length"),
    ),
    tensors=(*OUTER_TENSORS, *ATTENTION_TENSORS, *FEED_FORWARD_TENSORS, *PRE_NORM_TENSORS),
)
