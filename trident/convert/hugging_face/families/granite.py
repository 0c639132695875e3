"""Granite 3: Llama with factors of the embedding, the branches, the scores and the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from trident.convert.hugging_face.families.llama import LLAMA, SHARED_FIELDS
from trident.convert.hugging_face.table.config_fields import Entries, FieldRule, attention_biases, same, tied_head
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.rope import rope_fields


def _read_scales(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: entries.take(name, 1.0) for name in ("attention_multiplier", "logits_scaling")}
    for name, value in values.items():
        if type(value) not in (int, float) or value <= 0:
            raise entries.refused(name, value, "should be a positive number")
    return {
        "softmax_scale": float(values["attention_multiplier"]),
        "logit_multiplier": 1.0 / values["logits_scaling"],
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
