"""GPT-NeoX and Pythia: LayerNorm, partial rotary embedding, parallel or sequential branches, an untied head."""

from __future__ import annotations

from trident.convert.hugging_face.table.config_fields import (
    ACTIVATION_NAMES,
    attention_biases,
    constant,
    irrelevant,
    mapped,
    same,
    tied_head,
)
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.rope import rope_fields
from trident.convert.hugging_face.table.tensors import OUR_LAYER, linear, matrix, norm

_THEIRS = "gpt_neox.layers.{layer}."


# Source: transformers `models/gpt_neox/configuration_gpt_neox.py` and `modeling_gpt_neox.py`.
GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fields=(
        constant(normalization="LayerNorm"),
        same("vocab_size", "vocab_size", 50432),
        same("num_layers", "num_hidden_layers", 44),
        same("hidden_size", "hidden_size", 6144),
        same("num_attention_heads", "num_attention_heads", 64),
        same("ffn_hidden_size", "intermediate_size", 24576),
        same("max_position_embeddings", "max_position_embeddings", 2048),
        mapped("activation_function", "hidden_act", ACTIVATION_NAMES, "gelu"),
        same("layernorm_epsilon", "layer_norm_eps", 1e-5),
        same("parallel_residual", "use_parallel_residual", True),
        rope_fields(default_percent=0.25, percent_name="rotary_pct", theta_name="rotary_emb_base"),
        attention_biases(default=True, elsewhere=True),
        same("attention_dropout", "attention_dropout", 0.0),
        same("hidden_dropout", "hidden_dropout", 0.0),
        same("init_method_std", "initializer_range", 0.02),
        tied_head(default=False),
        irrelevant("classifier_dropout"),
    ),
    tensors=(
        matrix("embedding.word_embeddings.weight", "gpt_neox.embed_in.weight"),
        *norm(OUR_LAYER + "input_layernorm", _THEIRS + "input_layernorm"),
        # [heads, 3, d] x h on both sides.
        *linear(OUR_LAYER + "self_attention.linear_qkv", _THEIRS + "attention.query_key_value"),
        *linear(OUR_LAYER + "self_attention.linear_proj", _THEIRS + "attention.dense"),
        *norm(OUR_LAYER + "pre_mlp_layernorm", _THEIRS + "post_attention_layernorm"),
        *linear(OUR_LAYER + "mlp.linear_fc1", _THEIRS + "mlp.dense_h_to_4h"),
        *linear(OUR_LAYER + "mlp.linear_fc2", _THEIRS + "mlp.dense_4h_to_h"),
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
