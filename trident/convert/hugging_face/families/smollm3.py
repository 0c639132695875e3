"""SmolLM3: Llama without rotary embedding in every fourth block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from trident.convert.hugging_face.families.llama import LLAMA, SHARED_FIELDS
from trident.convert.hugging_face.table.config_fields import (
    Entries,
    FieldRule,
    attention_biases,
    irrelevant,
    only,
    same,
    tied_head,
)
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.rope import rope_fields
from trident.convert.hugging_face.table.windows import FULL, WINDOWED, read_layer_types, shortest


def _read_rotated_layers(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = fields["num_layers"]
    every = entries.positive("no_rope_layer_interval", 4, (int,), "a number of layers")
    given = entries.take("no_rope_layers", [int((layer + 1) % every != 0) for layer in range(layers)])
    if not isinstance(given, list) or len(given) < layers or not all(value in (0, 1) for value in given):
        raise entries.refused(
            "no_rope_layers", given, f"should be a list of {layers} numbers, 1 for blocks that rotate"
        )
    if any(read_layer_types(entries, layers) or ()):
        raise entries.refused("layer_types", WINDOWED, f"is supported only as {FULL}")
    pattern = shortest([int(value) for value in given[:layers]])
    return {"rope_layer_pattern": () if all(pattern) else pattern}


def _write_rotated_layers(model: ModelConfig) -> dict[str, Any]:
    return {
        "no_rope_layers": [int(model.is_rotary_layer(layer)) for layer in range(model.num_layers)],
        "layer_types": [FULL] * model.num_layers,
    }


# Source: transformers `models/smollm3/configuration_smollm3.py` and `modeling_smollm3.py`.
SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=(
        *SHARED_FIELDS,
        rope_fields(default_theta=2_000_000.0),
        attention_biases(),
        same("mlp_bias", "mlp_bias", False),
        tied_head(default=True),
        FieldRule(_read_rotated_layers, _write_rotated_layers),
        only("use_sliding_window", False),
        irrelevant("sliding_window", "max_window_layers", "pretraining_tp"),
    ),
    tensors=LLAMA.tensors,
)
