"""Phi-3 and Phi-4-mini: fused tensors, partial rotary embedding, frequencies for short and long contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from trident.convert.hugging_face.families.llama import OUTER_TENSORS, PRE_NORM_TENSORS, SHARED_FIELDS, THEIR_LAYER
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
from trident.convert.hugging_face.table.rope import merged_parameters, read_parameters, rope_fields
from trident.convert.hugging_face.table.tensors import OUR_LAYER, gate_and_up, linear, separate_query_key_value
from trident.convert.hugging_face.table.windows import window_of_all_layers

_ORIGINAL = "original_max_position_embeddings"
_QUERY_KEY_VALUE = THEIR_LAYER + "self_attn.qkv_proj"
_GATE_AND_UP = THEIR_LAYER + "mlp.gate_up_proj"


def _read_rotation(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    merged, name = merged_parameters(entries, "rope_theta", "partial_rotary_factor")
    kind = merged.get("rope_type", "default")
    if kind == "yarn":  # an older name for longrope in this family
        merged["rope_type"] = "longrope"
    elif kind not in ("default", "su", "longrope"):
        raise entries.refused(name, kind, "is supported only as longrope")
    defaults = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, _ORIGINAL: 4096}
    return {"position_embedding_type": "rope", **read_parameters({**defaults, **merged}, name, fields)}


def _write_rotation(model: ModelConfig) -> dict[str, Any]:
    written = dict(rope_fields(default_percent=1.0).write(model))
    written[_ORIGINAL] = model.original_context
    if written.get("rope_scaling") is not None:  # older versions reject other keys
        allowed = ("type", "short_factor", "long_factor", "attention_factor")
        written["rope_scaling"] = {key: value for key, value in written["rope_scaling"].items() if key in allowed}
    return written


# Source: transformers `models/phi3/configuration_phi3.py` and `modeling_phi3.py`.
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields=(
        *SHARED_FIELDS,
        same("layernorm_epsilon", "rms_norm_eps", 1e-5),
        same("hidden_dropout", "resid_pdrop", 0.0),
        constant(add_bias_linear=False),
        FieldRule(_read_rotation, _write_rotation),
        window_of_all_layers(),
        tied_head(default=False),
        only("attention_bias", False, is_written=False),
        only("mlp_bias", False, is_written=False),
        only("lm_head_bias", False, is_written=False),
        only("full_attn_mod", 1, is_written=False),
        only("interpolate_factor", 1, is_written=False),
        irrelevant("embd_pdrop"),
    ),
    tensors=(
        *OUTER_TENSORS,
        *separate_query_key_value(
            OUR_LAYER + "self_attention.linear_qkv", _QUERY_KEY_VALUE, _QUERY_KEY_VALUE, _QUERY_KEY_VALUE
        ),
        *linear(OUR_LAYER + "self_attention.linear_proj", THEIR_LAYER + "self_attn.o_proj"),
        *gate_and_up(OUR_LAYER + "mlp.linear_fc1", _GATE_AND_UP, _GATE_AND_UP),
        *linear(OUR_LAYER + "mlp.linear_fc2", THEIR_LAYER + "mlp.down_proj"),
        *PRE_NORM_TENSORS,
    ),
)
