"""Rotary positions in the older and the newer form of `config.json`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.config import ModelConfig
from megatron.errors import ConversionError
from trident.convert.hugging_face.table.config_fields import constant, read_fields, write_fields
from trident.convert.hugging_face.table.family import essential_fields
from trident.convert.hugging_face.table.rope import rope_fields

SIZES = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 1024}
LONG = {"short_factor": [1, 1.5] * 4, "long_factor": [2, 3] * 4, "original_max_position_embeddings": 1024}


def read(config: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    found = read_fields((constant(**SIZES), rope_fields(**defaults)), config)
    return {name: value for name, value in found.items() if name not in SIZES}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, {"rope_scaling_type": "none"}),
        ({"rope_type": "linear", "factor": 2}, {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}),
        (
            {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 99},  # which nobody reads
            {"rope_scaling_type": "dynamic", "rope_scaling_factor": 4.0},
        ),
        (
            {"rope_type": "llama3", **LLAMA3},
            {
                "rope_scaling_type": "llama3",
                "rope_scaling_factor": 8.0,
                "rope_low_freq_factor": 1.0,
                "rope_high_freq_factor": 4.0,
                "rope_original_max_positions": 1024,
            },
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "finetuned": True, "truncate": True},
            {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_beta_fast": 16.0},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
            {
                "rope_scaling_type": "yarn",
                "rope_scaling_factor": 4.0,
                "rope_attention_factor": (1 + 0.1 * math.log(4)) / (1 + 0.05 * math.log(4)),
            },
        ),
        (
            {"rope_type": "longrope", **LONG},
            {
                "rope_scaling_type": "longrope",
                "rope_short_factors": (1.0, 1.5) * 4,
                "rope_long_factors": (2.0, 3.0) * 4,
                "rope_original_max_positions": 1024,
            },
        ),
        (
            {"rope_type": "longrope", **LONG, "factor": 8.0},
            {
                "rope_scaling_type": "longrope",
                "rope_short_factors": (1.0, 1.5) * 4,
                "rope_long_factors": (2.0, 3.0) * 4,
                "rope_original_max_positions": 1024,
                "rope_attention_factor": math.sqrt(1 + math.log(8) / math.log(1024)),
            },
        ),
    ],
)
def test_both_forms_say_the_same(parameters: dict[str, Any], expected: dict[str, Any]) -> None:
    everything = {"position_embedding_type": "rope", "rotary_base": 500.0, "rotary_percent": 1.0, **expected}
    newer = {"rope_parameters": {"rope_theta": 500, **parameters}}
    older: dict[str, Any] = {"rope_theta": 500, "rope_scaling": None}
    if parameters:
        kind = parameters["rope_type"]
        older["rope_scaling"] = {"type": kind, **{k: v for k, v in parameters.items() if k != "rope_type"}}
    for form in (newer, older):
        found = read(form)
        assert found.keys() == everything.keys()
        assert all(
            found[name] == (pytest.approx(value) if isinstance(value, float) else value)
            for name, value in everything.items()
        )
    model = network(everything)
    again = network(read(write_fields((rope_fields(),), model)))
    assert essential_fields(again) == essential_fields(model)


def network(fields: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**{**SIZES, **fields}, vocab_size=10, padded_vocab_size=10)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"rope_scaling": {"type": "spiral"}},
            '"rope_scaling.rope_type": "spiral", which is not among default, linear',
        ),
        ({"rope_scaling": {"type": "linear"}}, "config.json has no rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, '"rope_scaling.factor": "2", which should be a number'),
        ({"rope_scaling": {"type": "linear", "factor": True}}, '"rope_scaling.factor": true, which should be a number'),
        ({"rope_scaling": {"type": "linear", "factor": 2, "twist": 1}}, '"rope_scaling.twist": 1, which is unknown'),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}},
            '"rope_scaling.truncate": 1, which should be true',
        ),
        ({"rope_scaling": {"type": "longrope", **LONG, "long_factor": 3}}, '"rope_scaling.long_factor": 3, .* a list'),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 10.5}},
            '"rope_scaling.original_max_position_embeddings": 10.5, which should be an integer',
        ),
        ({"rope_scaling": "linear"}, '"rope_scaling": "linear", which should be an object'),
        ({"rope_theta": "big"}, '"rope_parameters.rope_theta": "big", which should be a number'),
        (
            {"rope_theta": 500, "rope_parameters": {"rope_theta": 400}},
            r'"rope_parameters": \{"rope_theta": 400\}, which contradicts rope_theta 500',
        ),
        ({"partial_rotary_factor": 0.5}, '"partial_rotary_factor": 0.5, which this family ignores'),
    ],
)
def test_what_cannot_be_expressed_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConversionError, match=says):
        read(config, default_percent=None)


def test_half_a_pair_cannot_be_rotated() -> None:
    with pytest.raises(ConversionError, match="rotates 5 of 16 channels, not a number of pairs"):
        read({"partial_rotary_factor": 0.33}, default_percent=1.0)


def test_older_names_are_a_family_s_own() -> None:
    names = {"theta_name": "rotary_emb_base", "percent_name": "rotary_pct", "default_percent": 1.0}
    found = read({"rotary_pct": 0.25, "rotary_emb_base": 500}, **names)
    assert (found["rotary_base"], found["rotary_percent"]) == (500.0, 0.25)


def test_a_network_without_rotation_writes_nothing() -> None:
    assert write_fields((rope_fields(),), network({})) == {}
