"""Gemma 2: zero-centred norms before and after the branches, soft caps, a window in every other layer.

The embedding is multiplied by the square root of its width, and scores are scaled by a number of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.convert.hugging_face.families.llama import (
    ATTENTION_TENSORS,
    FEED_FORWARD_TENSORS,
    IGNORED_TENSORS,
    OUR_LAYER,
    OUTER_TENSORS,
    THEIR_LAYER,
)
from megatron.convert.hugging_face.families.qwen3 import ATTENTION_BIASES
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
from megatron.convert.hugging_face.table.tensors import TensorMapping, norm
from megatron.convert.hugging_face.table.windows import (
    checked_window,
    layer_types,
    pattern_of,
    read_layer_types,
    windows,
)


def _read_scales(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    scalar = entries.take("query_pre_attn_scalar", 256)
    if type(scalar) not in (int, float) or scalar <= 0:
        raise entries.refused("query_pre_attn_scalar", scalar, "should be a positive number")
    return {"softmax_scale": scalar**-0.5, "embedding_multiplier": fields["hidden_size"] ** 0.5}


def _write_scales(model: ModelConfig) -> dict[str, Any]:
    scale = model.softmax_scale
    return {"query_pre_attn_scalar": model.kv_channels if scale is None else round(scale**-2)}


def layered_window(period: int) -> Functions:
    """The rule for windows in all layers but every `period`-th, where the file has no list `layer_types`."""

    def read(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
        layers = fields["num_layers"]
        # Written by some versions in addition to the list, where it says nothing new.
        every = entries.take("sliding_window_pattern", entries.take("_sliding_window_pattern", period))
        pattern = read_layer_types(entries, layers)
        if pattern is None:
            if type(every) is not int or every < 1:
                raise entries.refused("sliding_window_pattern", every, "should be a number of layers")
            pattern = tuple(int((layer + 1) % every != 0) for layer in range(layers))
        if entries.is_null("sliding_window") and any(pattern):
            raise entries.refused("sliding_window", None, "should be a number of tokens")
        return windows(checked_window(entries, entries.take("sliding_window", 4096)), pattern)

    def write(model: ModelConfig) -> dict[str, Any]:
        pattern = pattern_of(model)
        return {"sliding_window": model.attention_window or 4096, "layer_types": layer_types(pattern)}

    return Functions(read, write)


# What Gemma 2 and 3 share; their classes have a default for every size, and published files leave out many.
GEMMA_FIELDS: tuple[FieldRule, ...] = (
    Constant(
        {
            "normalization": "RMSNorm",
            "apply_layernorm_1p": True,
            "norm_placement": "sandwich",
            "gated_linear_unit": True,
            "hidden_dropout": 0.0,
        }
    ),
    Same("num_layers", "num_hidden_layers", 26),
    Same("hidden_size", "hidden_size", 2304),
    Same("ffn_hidden_size", "intermediate_size", 9216),
    Same("num_attention_heads", "num_attention_heads", 8),
    Same("num_query_groups", "num_key_value_heads", 4),
    Same("kv_channels", "head_dim", 256),
    Mapped(
        "activation_function",
        "hidden_activation",
        (("gelu_pytorch_tanh", "gelu_tanh"), *ACTIVATION_NAMES),
        "gelu_pytorch_tanh",
    ),
    Same("layernorm_epsilon", "rms_norm_eps", 1e-6),
    Same("attention_dropout", "attention_dropout", 0.0),
    Same("init_method_std", "initializer_range", 0.02),
    ATTENTION_BIASES,
    Functions(_read_scales, _write_scales),
    Only("use_bidirectional_attention", (False,), is_written=False),
    tied_head(default=True),
    # `hidden_act` is an older name that the network does not read.
    Irrelevant(("hidden_act", "cache_implementation")),
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
        value = entries.take(theirs, None if entries.is_null(theirs) else default)
        if value is not None and (type(value) not in (int, float) or value <= 0):
            raise entries.refused(theirs, value, "should be a positive number")
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
        Same("vocab_size", "vocab_size", 256000),
        Same("max_position_embeddings", "max_position_embeddings", 8192),
        *GEMMA_FIELDS,
        Functions(_read_softcap, lambda model: {theirs: getattr(model, ours) for ours, theirs, _ in _SOFTCAPS}),
        rope_fields(),
        layered_window(period=2),
    ),
    tensors=(*OUTER_TENSORS, *ATTENTION_TENSORS, *FEED_FORWARD_TENSORS, *SANDWICH_NORM_TENSORS),
    ignored_tensors=IGNORED_TENSORS,
)
