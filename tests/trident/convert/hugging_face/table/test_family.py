"""A family as a whole: what its files hold, and what it cannot express."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.errors import ConversionError
from tests.helpers.networks import tiny_config
from trident.convert.hugging_face.registry import family_of
from trident.convert.hugging_face.table.family import essential_fields

GPT2 = family_of({"model_type": "gpt2"})
ROPE = {"position_embedding_type": "rope"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"add_bias_linear": False, "add_qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}),
        ({}, {"rotary_base": 5.0, "rope_scaling_factor": 2.0}),
        (ROPE, {**ROPE, "rope_low_freq_factor": 0.5, "rope_beta_fast": 7.0}),
        (
            {**ROPE, "rope_scaling_type": "yarn"},
            {**ROPE, "rope_scaling_type": "yarn", "rope_original_max_positions": 16},
        ),
        ({}, {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
        ({}, {"softmax_scale": 8**-0.5}),
        ({}, {"attention_window": 4, "attention_window_pattern": (0,)}),
        ({"attention_window": 4}, {"attention_window": 4, "attention_window_pattern": (1, 1)}),
        ({}, {"hidden_dropout": 0.5, "init_method_std": 0.5}),
    ],
)
def test_networks_that_compute_the_same_have_the_same_essential_fields(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert essential_fields(tiny_config(**one)) == essential_fields(tiny_config(**other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"mlp_bias": False}),
        (ROPE, {**ROPE, "rotary_base": 5.0}),
        ({"attention_window": 4}, {"attention_window": 4, "attention_window_pattern": (1, 0)}),
        ({}, {"softmax_scale": 0.5}),
        ({}, {"layernorm_epsilon": 1e-6}),
        ({}, {"activation_function": "gelu"}),
    ],
)
def test_others_do_not(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert essential_fields(tiny_config(**one)) != essential_fields(tiny_config(**other))


def test_what_is_lost_is_named_with_its_value() -> None:
    model = tiny_config(layernorm_epsilon=1e-6, qk_layernorm=True)
    with pytest.raises(
        ConversionError,
        match=r"gpt2 cannot express this network: it has no .* of --qk-layernorm\. It has --no-qk-layernorm\.",
    ):
        GPT2.write_config(model)
    obstacle = GPT2.obstacle(model, GPT2.write_config(tiny_config()))
    assert obstacle is not None and "--layernorm-epsilon 1e-06" in obstacle.text


def test_fields_that_another_kind_of_positions_does_not_have_are_not_named() -> None:
    obstacle = GPT2.obstacle(tiny_config(position_embedding_type="rope", rotary_percent=0.5))
    assert obstacle is not None
    assert (
        obstacle.text
        == "it has no equivalent of --position-embedding-type rope. It has --position-embedding-type learned_absolute."
    )


def test_a_configuration_that_cannot_be_read_back_is_a_difference() -> None:
    obstacle = GPT2.obstacle(tiny_config(), {"n_layer": "two"})
    assert obstacle is not None and '"n_layer": "two"' in obstacle.text


def test_a_network_that_cannot_be_built_is_refused() -> None:
    config = {**GPT2.write_config(tiny_config()), "n_head": 5}
    with pytest.raises(ConversionError, match="network that cannot be built: --hidden-size 32 is not divisible by"):
        GPT2.read_config(config)


def test_buffers_are_known_by_their_pattern() -> None:
    assert GPT2.is_ignored("transformer.h.11.attn.bias")
    assert not GPT2.is_ignored("transformer.h.11.attn.c_attn.bias")
    assert not dataclasses.replace(GPT2, ignored_tensors=()).is_ignored("transformer.h.11.attn.bias")
