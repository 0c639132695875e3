"""GPT-NeoX and Pythia: LayerNorm, partial rotation, branches in parallel or one after the other, a head of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.convert.hugging_face.table.family import Family
from megatron.convert.hugging_face.table.fields import (
    ACTIVATION_NAMES,
    Constant,
    Entries,
    Functions,
    Irrelevant,
    Mapped,
    Same,
    tied_head,
)
from megatron.convert.hugging_face.table.rope import rope_fields
from megatron.convert.hugging_face.table.tensors import linear, matrix, norm

_OURS = "decoder.layers.{layer}."
_THEIRS = "gpt_neox.layers.{layer}."


def _read_biases(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    attention = entries.take("attention_bias", True)
    return {"add_bias_linear": True, "add_qkv_bias": attention, "attention_output_bias": attention}


# Source: transformers `models/gpt_neox/configuration_gpt_neox.py` and `modeling_gpt_neox.py`.
GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fields=(
        Constant({"normalization": "LayerNorm"}),
        Same("vocab_size", "vocab_size", 50432),
        Same("num_layers", "num_hidden_layers", 44),
        Same("hidden_size", "hidden_size", 6144),
        Same("num_attention_heads", "num_attention_heads", 64),
        Same("ffn_hidden_size", "intermediate_size", 24576),
        Same("max_position_embeddings", "max_position_embeddings", 2048),
        Mapped("activation_function", "hidden_act", ACTIVATION_NAMES, "gelu"),
        Same("layernorm_epsilon", "layer_norm_eps", 1e-5),
        Same("parallel_residual", "use_parallel_residual", True),
        rope_fields(default_percent=0.25, percent_name="rotary_pct", theta_name="rotary_emb_base"),
        Functions(_read_biases, lambda model: {"attention_bias": model.add_qkv_bias}),
        Same("attention_dropout", "attention_dropout", 0.0),
        Same("hidden_dropout", "hidden_dropout", 0.0),
        Same("init_method_std", "initializer_range", 0.02),
        tied_head(default=False),
        Irrelevant(("classifier_dropout",)),
    ),
    tensors=(
        matrix("embedding.word_embeddings.weight", "gpt_neox.embed_in.weight"),
        *norm(_OURS + "input_layernorm", _THEIRS + "input_layernorm"),
        # Theirs is [heads, 3, d] x h, as ours.
        *linear(_OURS + "self_attention.linear_qkv", _THEIRS + "attention.query_key_value"),
        *linear(_OURS + "self_attention.linear_proj", _THEIRS + "attention.dense"),
        *norm(_OURS + "pre_mlp_layernorm", _THEIRS + "post_attention_layernorm"),
        *linear(_OURS + "mlp.linear_fc1", _THEIRS + "mlp.dense_h_to_4h"),
        *linear(_OURS + "mlp.linear_fc2", _THEIRS + "mlp.dense_4h_to_h"),
        *norm("decoder.final_layernorm", "gpt_neox.final_layer_norm"),
        matrix("output_layer.weight", "embed_out.weight"),
    ),
    ignored_tensors=(
        _THEIRS + "attention.rotary_emb.inv_freq",
        _THEIRS + "attention.bias",
        _THEIRS + "attention.masked_bias",
    ),
    head="embed_out.weight",
    embedding="gpt_neox.embed_in.weight",
)
