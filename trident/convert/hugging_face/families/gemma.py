"""Gemma 2 and 3: zero-centered norms before and after the branches, windows in most layers, scaled embeddings.

The embedding is multiplied by the square root of its width, and the scale of scores is a field. Gemma 2 has soft caps.
Gemma 3 normalizes queries and keys instead, and layers with a window have another rotary base without scaling. Of
multimodal models, the text model is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from trident.convert.hugging_face.families.llama import (
    ATTENTION_TENSORS,
    FEED_FORWARD_TENSORS,
    OUTER_TENSORS,
    QUERY_KEY_NORM_TENSORS,
    THEIR_LAYER,
)
from trident.convert.hugging_face.table.config_fields import (
    ACTIVATION_NAMES,
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
from trident.convert.hugging_face.table.tensors import OUR_LAYER, TensorMapping, below, norm
from trident.convert.hugging_face.table.windows import layered_window, rotations_by_window


def _read_scales(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    scalar = entries.positive("query_pre_attn_scalar", 256)
    return {"softmax_scale": scalar**-0.5, "embedding_multiplier": fields["hidden_size"] ** 0.5}


def _write_scales(model: ModelConfig) -> dict[str, Any]:
    scale = model.softmax_scale
    return {"query_pre_attn_scalar": model.kv_channels if scale is None else round(scale**-2)}


# Fields of both; their classes have defaults for all sizes, and published files omit many.
GEMMA_FIELDS: tuple[FieldRule, ...] = (
    constant(
        normalization="RMSNorm",
        apply_layernorm_1p=True,
        norm_placement="sandwich",
        gated_linear_unit=True,
        hidden_dropout=0.0,
    ),
    same("num_layers", "num_hidden_layers", 26),
    same("hidden_size", "hidden_size", 2304),
    same("ffn_hidden_size", "intermediate_size", 9216),
    same("num_attention_heads", "num_attention_heads", 8),
    same("num_query_groups", "num_key_value_heads", 4),
    same("kv_channels", "head_dim", 256),
    mapped(
        "activation_function",
        "hidden_activation",
        (("gelu_pytorch_tanh", "gelu_tanh"), *ACTIVATION_NAMES),
        "gelu_pytorch_tanh",
    ),
    same("layernorm_epsilon", "rms_norm_eps", 1e-6),
    same("attention_dropout", "attention_dropout", 0.0),
    same("init_method_std", "initializer_range", 0.02),
    attention_biases(),
    FieldRule(_read_scales, _write_scales),
    only("use_bidirectional_attention", False, is_written=False),
    tied_head(default=True),
    # `hidden_act` is an older, unused name.
    irrelevant("hidden_act", "cache_implementation"),
)
SANDWICH_NORM_TENSORS: tuple[TensorMapping, ...] = (
    *norm(OUR_LAYER + "input_layernorm", THEIR_LAYER + "input_layernorm"),
    *norm(OUR_LAYER + "post_self_attn_layernorm", THEIR_LAYER + "post_attention_layernorm"),
    *norm(OUR_LAYER + "pre_mlp_layernorm", THEIR_LAYER + "pre_feedforward_layernorm"),
    *norm(OUR_LAYER + "post_mlp_layernorm", THEIR_LAYER + "post_feedforward_layernorm"),
)


def _read_softcap(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    caps = {}
    for ours, theirs, default in _SOFTCAPS:
        value = entries.positive(theirs, None if entries.is_null(theirs) else default)
        caps[ours] = None if value is None else float(value)
    return caps


_SOFTCAPS = (
    ("attention_logit_softcap", "attn_logit_softcapping", 50.0),
    ("output_logit_softcap", "final_logit_softcapping", 30.0),
)

# Source: transformers `models/gemma2/configuration_gemma2.py` and `modeling_gemma2.py`.
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=(
        same("vocab_size", "vocab_size", 256000),
        same("max_position_embeddings", "max_position_embeddings", 8192),
        *GEMMA_FIELDS,
        FieldRule(_read_softcap, lambda model: {theirs: getattr(model, ours) for ours, theirs, _ in _SOFTCAPS}),
        rope_fields(),
        layered_window(period=2),
    ),
    tensors=(*OUTER_TENSORS, *ATTENTION_TENSORS, *FEED_FORWARD_TENSORS, *SANDWICH_NORM_TENSORS),
)


# Source: transformers `models/gemma3/configuration_gemma3.py` and `modeling_gemma3.py`.
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=(
        same("vocab_size", "vocab_size", 262208),
        same("max_position_embeddings", "max_position_embeddings", 131072),
        *GEMMA_FIELDS,
        constant(qk_layernorm=True, qk_layernorm_scope="head"),
        same("output_logit_softcap", "final_logit_softcapping", None),
        irrelevant("attn_logit_softcapping"),  # unused
        rotations_by_window(1_000_000.0, 10_000.0, windowed_name="rope_local_base_freq"),
        layered_window(period=6),
    ),
    tensors=(
        *OUTER_TENSORS,
        *ATTENTION_TENSORS,
        *QUERY_KEY_NORM_TENSORS,
        *FEED_FORWARD_TENSORS,
        *SANDWICH_NORM_TENSORS,
    ),
)

# Source: the same files, `Gemma3ForConditionalGeneration`.
GEMMA3_WITH_IMAGES = dataclasses.replace(
    GEMMA3,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    tensors=below("language_model.", GEMMA3.tensors),
    ignored_tensors=("vision_tower.", "multi_modal_projector."),
    head="language_model.lm_head.weight",
    embedding="language_model.model.embed_tokens.weight",
    text_field="text_config",
)
