"""BLOOM: ALiBi, LayerNorm also after the embedding, an inner width of four times the hidden size, a tied head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trident.convert.hugging_face.table.config_fields import (
    Entries,
    FieldRule,
    constant,
    irrelevant,
    only,
    same,
    tied_head,
)
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.tensors import OUR_LAYER, linear, matrix, norm

_THEIRS = "transformer.h.{layer}."


def _read_inner_width(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    entries.check_only("n_inner", (4 * fields["hidden_size"],))
    return {"ffn_hidden_size": 4 * fields["hidden_size"]}


# Source: transformers `models/bloom/configuration_bloom.py` and `modeling_bloom.py`.
BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    fields=(
        constant(
            normalization="LayerNorm",
            position_embedding_type="alibi",
            embed_layernorm=True,
            activation_function="gelu_tanh",
        ),
        same("vocab_size", "vocab_size", 250880),
        same("hidden_size", "hidden_size", 64, also=("n_embed",)),
        same("num_layers", "n_layer", 2, also=("num_hidden_layers",)),
        same("num_attention_heads", "n_head", 8, also=("num_attention_heads",)),
        same("max_position_embeddings", "seq_length", 2048),
        FieldRule(_read_inner_width),
        same("layernorm_epsilon", "layer_norm_epsilon", 1e-5),
        same("apply_residual_connection_post_layernorm", "apply_residual_connection_post_layernorm", False),
        same("hidden_dropout", "hidden_dropout", 0.0),
        same("attention_dropout", "attention_dropout", 0.0),
        same("init_method_std", "initializer_range", 0.02),
        tied_head(default=True),
        # Other values reproduce bugs of the first training code; published files never set them.
        only("skip_bias_add_qkv", False, is_written=False),
        # Former splits of products, and fusions: rounding only.
        irrelevant("pretraining_tp", "slow_but_exact", "attention_softmax_in_fp32", "bias_dropout_fusion"),
        irrelevant("masked_softmax_fusion", "offset_alibi", "skip_bias_add", "unk_token_id"),
    ),
    tensors=(
        matrix("embedding.word_embeddings.weight", "transformer.word_embeddings.weight"),
        *norm("embedding.word_embeddings_layernorm", "transformer.word_embeddings_layernorm"),
        *norm(OUR_LAYER + "input_layernorm", _THEIRS + "input_layernorm"),
        # [heads, 3, d] x h on both sides.
        *linear(OUR_LAYER + "self_attention.linear_qkv", _THEIRS + "self_attention.query_key_value"),
        *linear(OUR_LAYER + "self_attention.linear_proj", _THEIRS + "self_attention.dense"),
        *norm(OUR_LAYER + "pre_mlp_layernorm", _THEIRS + "post_attention_layernorm"),
        *linear(OUR_LAYER + "mlp.linear_fc1", _THEIRS + "mlp.dense_h_to_4h"),
        *linear(OUR_LAYER + "mlp.linear_fc2", _THEIRS + "mlp.dense_4h_to_h"),
        *norm("decoder.final_layernorm", "transformer.ln_f"),
        matrix("output_layer.weight", "lm_head.weight"),
    ),
    ignored_tensors=(),
    optional_prefix="transformer.",
    embedding="transformer.word_embeddings.weight",
)
