"""GPT-2: learned positions, LayerNorm, matrices stored as [in, out], a tied head."""

from __future__ import annotations

from trident.convert.hugging_face.table.config_fields import (
    ACTIVATION_NAMES,
    constant,
    irrelevant,
    mapped,
    only,
    same,
    tied_head,
)
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.tensors import OUR_LAYER, MappedPart, TensorMapping, linear, matrix, norm

_QKV = OUR_LAYER + "self_attention.linear_qkv"

# Source: transformers `models/gpt2/configuration_gpt2.py` and `modeling_gpt2.py`.
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fields=(
        constant(position_embedding_type="learned_absolute", normalization="LayerNorm"),
        same("num_layers", "n_layer", 12),
        same("hidden_size", "n_embd", 768),
        same("num_attention_heads", "n_head", 12),
        same("max_position_embeddings", "n_positions", 1024),
        same("ffn_hidden_size", "n_inner", lambda fields: 4 * fields["hidden_size"]),
        same("vocab_size", "vocab_size", 50257),
        mapped(
            "activation_function", "activation_function", (("gelu_new", "gelu_tanh"), *ACTIVATION_NAMES), "gelu_new"
        ),
        same("layernorm_epsilon", "layer_norm_epsilon", 1e-5),
        same("hidden_dropout", "resid_pdrop", 0.1),
        same("attention_dropout", "attn_pdrop", 0.1),
        same("init_method_std", "initializer_range", 0.02),
        tied_head(default=True),
        only("scale_attn_weights", True),
        only("scale_attn_by_inverse_layer_idx", False),
        only("reorder_and_upcast_attn", False, True),  # only affects rounding in half precision
        irrelevant("n_ctx", "embd_pdrop"),
        irrelevant(
            "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"
        ),
    ),
    tensors=(
        matrix("embedding.word_embeddings.weight", "transformer.wte.weight"),
        matrix("embedding.position_embeddings.weight", "transformer.wpe.weight"),
        *norm(OUR_LAYER + "input_layernorm", "transformer.h.{layer}.ln_1"),
        # Ours [heads, 3, d, h]; theirs [h, 3 x heads x d]: all queries, then all keys, then all values.
        TensorMapping(
            f"{_QKV}.weight", (MappedPart("transformer.h.{layer}.attn.c_attn.weight", order=(3, 1, 0, 2), columns=3),)
        ),
        TensorMapping(
            f"{_QKV}.bias", (MappedPart("transformer.h.{layer}.attn.c_attn.bias", order=(1, 0, 2), columns=0),)
        ),
        *linear(OUR_LAYER + "self_attention.linear_proj", "transformer.h.{layer}.attn.c_proj", (1, 0)),
        *norm(OUR_LAYER + "pre_mlp_layernorm", "transformer.h.{layer}.ln_2"),
        *linear(OUR_LAYER + "mlp.linear_fc1", "transformer.h.{layer}.mlp.c_fc", (1, 0)),
        *linear(OUR_LAYER + "mlp.linear_fc2", "transformer.h.{layer}.mlp.c_proj", (1, 0)),
        *norm("decoder.final_layernorm", "transformer.ln_f"),
        *linear("output_layer", "lm_head"),
    ),
    ignored_tensors=("transformer.h.{layer}.attn.bias", "transformer.h.{layer}.attn.masked_bias"),
    optional_prefix="transformer.",
    embedding="transformer.wte.weight",
)
