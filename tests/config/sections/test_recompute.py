"""Which activations are computed again."""

from __future__ import annotations

import pytest

from megatron.config import RecomputeConfig
from megatron.errors import ConfigError


def test_both_recompute_flags_agree() -> None:
    assert RecomputeConfig(recompute_granularity="full").checkpoint_activations
    assert RecomputeConfig(activations_checkpoint_method="uniform").checkpoint_activations
    assert RecomputeConfig(recompute_activations=True).recomputes_attention
    assert not RecomputeConfig(checkpoint_activations=True).recomputes_attention
    assert not RecomputeConfig().checkpoint_activations


def test_whole_blocks_and_attention_only_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="--recompute-activations means selective"):
        RecomputeConfig(recompute_activations=True, recompute_granularity="full")
    with pytest.raises(ConfigError, match=r"--recompute-granularity some is unknown\. Use one of: full, selective"):
        RecomputeConfig(recompute_granularity="some")
