"""Qwen 3: queries and keys are normalized within each head, whose width is a number of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.convert.hugging_face.families.llama import (
    IGNORED_TENSORS,
    LLAMA,
    OUR_LAYER,
    SHARED_FIELDS,
    THEIR_LAYER,
)
from megatron.convert.hugging_face.table.family import Family
from megatron.convert.hugging_face.table.fields import Constant, Entries, FieldRule, Functions, Same, tied_head
from megatron.convert.hugging_face.table.rope import rope_fields
from megatron.convert.hugging_face.table.tensors import TensorMapping, norm
from megatron.convert.hugging_face.table.windows import switched_window

QUERY_KEY_NORM_TENSORS: tuple[TensorMapping, ...] = (
    *norm(OUR_LAYER + "self_attention.q_layernorm", THEIR_LAYER + "self_attn.q_norm"),
    *norm(OUR_LAYER + "self_attention.k_layernorm", THEIR_LAYER + "self_attn.k_norm"),
)


def _read_biases(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    attention = entries.take("attention_bias", False)
    return {"add_bias_linear": False, "add_qkv_bias": attention, "attention_output_bias": attention}


# The biases of attention, which one field turns on: queries, keys, values and output.
ATTENTION_BIASES: FieldRule = Functions(_read_biases, lambda model: {"attention_bias": model.add_qkv_bias})

# Source: transformers `models/qwen3/configuration_qwen3.py` and `modeling_qwen3.py`.
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=(
        *SHARED_FIELDS,
        Same("kv_channels", "head_dim", 128),
        Constant({"qk_layernorm": True, "qk_layernorm_scope": "head"}),
        ATTENTION_BIASES,
        rope_fields(),
        switched_window(),
        tied_head(default=False),
    ),
    tensors=(*LLAMA.tensors, *QUERY_KEY_NORM_TENSORS),
    ignored_tensors=IGNORED_TENSORS,
)
