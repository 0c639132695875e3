"""Llama 1 to 3: rotary positions with every scaling, RMSNorm, gated feed-forward, grouped queries, optional biases.

Most later families use the same tensor names, and their tables are built from this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.convert.hugging_face.table.family import Family
from megatron.convert.hugging_face.table.fields import (
    ACTIVATION_NAMES,
    Constant,
    Entries,
    FieldRule,
    Functions,
    Irrelevant,
    Mapped,
    Only,
    Same,
    tied_head,
)
from megatron.convert.hugging_face.table.rope import rope_fields
from megatron.convert.hugging_face.table.tensors import (
    TensorMapping,
    gate_and_up,
    linear,
    matrix,
    norm,
    separate_query_key_value,
)

OUR_LAYER = "decoder.layers.{layer}."
THEIR_LAYER = "model.layers.{layer}."

# Sizes, norms and the gated activation, which have the same names in most families.
SHARED_FIELDS: tuple[FieldRule, ...] = (
    Constant({"normalization": "RMSNorm", "gated_linear_unit": True, "hidden_dropout": 0.0}),
    Same("vocab_size", "vocab_size"),
    Same("num_layers", "num_hidden_layers"),
    Same("hidden_size", "hidden_size"),
    Same("ffn_hidden_size", "intermediate_size"),
    Same("num_attention_heads", "num_attention_heads"),
    Same("num_query_groups", "num_key_value_heads", lambda fields: fields["num_attention_heads"]),
    Same("kv_channels", "head_dim", lambda fields: fields["hidden_size"] // fields["num_attention_heads"]),
    Same("max_position_embeddings", "max_position_embeddings"),
    Mapped("activation_function", "hidden_act", ACTIVATION_NAMES, "silu"),
    Same("layernorm_epsilon", "rms_norm_eps", 1e-6),
    Same("attention_dropout", "attention_dropout", 0.0),
    Same("init_method_std", "initializer_range", 0.02),
)

# What all of these families name alike: the embedding, the final norm and the head.
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
# Old files hold the frequencies of the rotation.
IGNORED_TENSORS = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")


def _read_biases(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    attention = entries.take("attention_bias", False)
    return {
        "add_bias_linear": False,
        "add_qkv_bias": attention,
        "attention_output_bias": attention,
        "mlp_bias": entries.take("mlp_bias", False),
    }


# Source: transformers `models/llama/configuration_llama.py` and `modeling_llama.py`.
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(
        *SHARED_FIELDS,
        rope_fields(),
        Functions(_read_biases, lambda model: {"attention_bias": model.add_qkv_bias, "mlp_bias": model.mlp_bias}),
        tied_head(default=False),
        Only("pretraining_tp", (1, 2, 4, 8)),  # how the products were once split; the result is the same
        Irrelevant(("max_sequence_length",)),
    ),
    tensors=(*OUTER_TENSORS, *ATTENTION_TENSORS, *FEED_FORWARD_TENSORS, *PRE_NORM_TENSORS),
    ignored_tensors=IGNORED_TENSORS,
)
