"""The architecture: defaults that follow from other fields, and the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import ModelConfig, ModelRequest
from megatron.errors import ConfigError


def request(**changes: Any) -> ModelRequest:
    """A small architecture."""
    sizes = {"num_layers": 2, "hidden_size": 12, "num_attention_heads": 4, "max_position_embeddings": 8}
    return ModelRequest(**{**sizes, **changes})


def test_widths_that_are_not_given_follow_from_the_others() -> None:
    assert (request().ffn_hidden_size, request().kv_channels) == (48, 3)
    assert (request(ffn_hidden_size=20).ffn_hidden_size, request(kv_channels=5).kv_channels) == (20, 5)


def test_heads_that_do_not_divide_the_width_need_a_width_of_their_own() -> None:
    with pytest.raises(
        ConfigError, match="--hidden-size 12 is not divisible by --num-attention-heads 5.*Use --hidden-size 15"
    ):
        request(num_attention_heads=5)
    assert request(num_attention_heads=5, kv_channels=2).kv_channels == 2


def test_an_out_of_bounds_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--hidden-dropout 1\.0 is out of range") as caught:
        request(hidden_dropout=1.0)
    assert len(caught.value.problems) == 1


def test_the_vocabulary_belongs_to_the_resolved_architecture() -> None:
    with pytest.raises(TypeError, match="vocab_size"):
        ModelConfig(num_layers=2, hidden_size=12, num_attention_heads=4, max_position_embeddings=8)
    assert request().vocab_size is None


def test_the_pattern_says_which_layers_have_experts() -> None:
    routed = request(num_layers=4, num_experts=4, moe_layer_pattern=(0, 1))
    assert [routed.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    assert request(num_experts=4).has_experts(0) and not request().has_experts(0)
