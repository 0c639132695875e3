"""Initial values, muP and fixed factors: defaults that follow from other fields, and contradictions."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelRequest
from megatron.config.architecture.scales import SAME, SCALED, XAVIER_UNIFORM


def request(**changes: Any) -> ModelRequest:
    """A small architecture."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 8}
    return ModelRequest(**{**sizes, **changes})


def test_upstreams_switch_for_xavier() -> None:
    found = request(init_method_xavier_uniform=True)
    assert (found.init_method, found.output_layer_init_method) == (XAVIER_UNIFORM, SAME)
    assert (request().init_method, request().output_layer_init_method) == ("normal", SCALED)


def test_nothing_is_scaled_without_mup() -> None:
    assert (request().logit_multiplier, request().softmax_scale, request().width_ratio) == (1.0, None, 1.0)


def test_factors_under_mup() -> None:
    found = request(use_mup=True, mup_base_hidden_size=16, mup_base_head_dim=4)
    assert (found.width_ratio, found.logit_multiplier, found.softmax_scale) == (4.0, 0.25, 2 / 16)
    assert request(use_mup=True).logit_multiplier == 1.0  # the base width is that of the network
    assert request(use_mup=True).softmax_scale == 1 / 16
    assert request(use_mup=True, mup_attn_scale_power=0.5).softmax_scale == 1 / 4


def test_factors_that_are_given_are_kept_under_mup() -> None:
    assert request(use_mup=True, mup_base_hidden_size=16, mup_output_mult=3.0).logit_multiplier == 3.0
    given = request(use_mup=True, mup_base_hidden_size=16, logit_multiplier=0.5, softmax_scale=0.1)
    assert (given.logit_multiplier, given.softmax_scale) == (0.5, 0.1)
