"""Gemma 3: Gemma 2 without soft caps, with normalized queries and keys, and two rotations.

Layers with a sliding window rotate with a base of their own and without scaling. Of models that also take images, the
text model is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.convert.hugging_face.families.gemma2 import GEMMA_FIELDS, SANDWICH_NORM_TENSORS, layered_window
from megatron.convert.hugging_face.families.llama import (
    ATTENTION_TENSORS,
    FEED_FORWARD_TENSORS,
    IGNORED_TENSORS,
    OUTER_TENSORS,
)
from megatron.convert.hugging_face.families.qwen3 import QUERY_KEY_NORM_TENSORS
from megatron.convert.hugging_face.table.family import Family
from megatron.convert.hugging_face.table.fields import Constant, Entries, Functions, Irrelevant, Same
from megatron.convert.hugging_face.table.rope import read_parameters, write_parameters
from megatron.convert.hugging_face.table.tensors import below
from megatron.convert.hugging_face.table.windows import FULL, WINDOWED

_THETA, _WINDOWED_THETA = 1_000_000.0, 10_000.0


def _read_rotations(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    theta = entries.take("rope_theta", _THETA)
    windowed_theta = entries.take("rope_local_base_freq", _WINDOWED_THETA)
    by_kind = entries.inner("rope_parameters")
    full: dict[str, Any] = {}
    if by_kind is not None:
        full = dict(by_kind.take(FULL, {}))
        windowed = read_parameters({"rope_theta": windowed_theta, **by_kind.take(WINDOWED, {})}, WINDOWED, fields)
        by_kind.check_all_read()
        if windowed["rope_scaling_type"] != "none":
            raise by_kind.refused(WINDOWED, windowed["rope_scaling_type"], "should not be scaled")
        windowed_theta = windowed["rotary_base"]
    scaling = dict(entries.take("rope_scaling", {}))  # the older form, for the layers with full attention
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    return {
        "position_embedding_type": "rope",
        **read_parameters({"rope_theta": theta, **full, **scaling}, "rope_parameters", fields),
        "rotary_base_windowed": float(windowed_theta),
    }


def _write_rotations(model: ModelConfig) -> dict[str, Any]:
    full = write_parameters(model)
    windowed_theta = model.rotary_base if model.rotary_base_windowed is None else model.rotary_base_windowed
    scaling = {key: value for key, value in full.items() if key != "rope_theta"}
    return {
        "rope_parameters": {FULL: full, WINDOWED: {"rope_type": "default", "rope_theta": windowed_theta}},
        "rope_theta": model.rotary_base,
        "rope_local_base_freq": windowed_theta,
        "rope_scaling": None if full["rope_type"] == "default" else scaling,
    }


# Source: transformers `models/gemma3/configuration_gemma3.py` and `modeling_gemma3.py`.
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields=(
        Same("vocab_size", "vocab_size", 262208),
        Same("max_position_embeddings", "max_position_embeddings", 131072),
        *GEMMA_FIELDS,
        Constant({"qk_layernorm": True, "qk_layernorm_scope": "head"}),
        Same("output_logit_softcap", "final_logit_softcapping", None),
        Irrelevant(("attn_logit_softcapping",)),  # a field that the network does not read
        Functions(_read_rotations, _write_rotations),
        layered_window(period=6),
    ),
    tensors=(
        *OUTER_TENSORS,
        *ATTENTION_TENSORS,
        *QUERY_KEY_NORM_TENSORS,
        *FEED_FORWARD_TENSORS,
        *SANDWICH_NORM_TENSORS,
    ),
    ignored_tensors=IGNORED_TENSORS,
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
