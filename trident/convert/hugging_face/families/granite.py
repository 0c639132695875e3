"""Granite 3: Llama with multipliers of the embedding, the branches, the scores and the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from trident.convert.hugging_face.families.llama import LLAMA, SHARED_FIELDS
from trident.convert.hugging_face.table.config_fields import Entries, FieldRule, attention_biases, same, tied_head
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.rope import rope_fields


def _read_scales(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "softmax_scale": float(entries.positive("attention_multiplier", 1.0)),
        "logit_multiplier": 1.0 / entries.positive("logits_scaling", 1.0),
    }


def _write_scales(model: ModelConfig) -> dict[str, Any]:
    scale, divisor = model.softmax_scale, 1.0 / model.logit_multiplier
    whole = float(round(divisor))
    return {
        "attention_multiplier": model.kv_channels**-0.5 if scale is None else scale,
        "logits_scaling": whole if whole and 1.0 / whole == model.logit_multiplier else divisor,
    }


# Source: transformers `models/granite/configuration_granite.py` and `modeling_granite.py`.
GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields=(
        *SHARED_FIELDS,
        rope_fields(),
        attention_biases(),
        same("mlp_bias", "mlp_bias", False),
        tied_head(default=False),
        same("embedding_multiplier", "embedding_multiplier", 1.0),
        same("residual_multiplier", "residual_multiplier", 1.0),
        FieldRule(_read_scales, _write_scales),
    ),
    tensors=LLAMA.tensors,
)
