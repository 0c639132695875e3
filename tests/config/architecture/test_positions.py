"""Positions: how many channels are rotated, and scalings whose numbers do not fit them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import ModelRequest
from megatron.config.rules.checking import checked_model
from megatron.errors import ConfigError

LATENT = {"multi_latent_attention": True, "qk_pos_emb_head_dim": 8, "qk_head_dim": 8, "v_head_dim": 8}


def request(**changes: Any) -> ModelRequest:
    """A small architecture with rotary positions and heads of 16 channels."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 8}
    return ModelRequest(**{**sizes, "position_embedding_type": "rope", **changes})


def longrope(short: int, long: int, **changes: Any) -> ModelRequest:
    factors = {"rope_short_factors": (1.0,) * short, "rope_long_factors": (2.0,) * long}
    return request(rope_scaling_type="longrope", **factors, **changes)


@pytest.mark.parametrize(("changes", "pairs"), [({}, 8), ({"rotary_percent": 0.35}, 2), (LATENT, 4)])
def test_longrope_has_a_factor_for_every_pair_of_channels(changes: dict[str, Any], pairs: int) -> None:
    assert longrope(pairs, pairs, **changes).rotary_width == 2 * pairs
    for short, long in ((pairs - 1, pairs - 1), (pairs, pairs + 1), (0, 0)):
        with pytest.raises(ConfigError, match=f"requires {pairs} .*-long-factors, .* got {short} and {long}"):
            checked_model(longrope(short, long, **changes))


def test_a_width_that_does_not_exist_is_the_only_problem() -> None:
    with pytest.raises(ConfigError, match="--hidden-size 66 is not divisible by") as refused:
        longrope(1, 1, hidden_size=66)
    assert "--rope-short-factors" not in str(refused.value)
