"""Which activations are computed again."""

from __future__ import annotations

from megatron.config import RecomputeConfig


def test_both_recompute_flags_agree() -> None:
    assert RecomputeConfig(recompute_granularity="full").checkpoint_activations
    assert RecomputeConfig(activations_checkpoint_method="uniform").checkpoint_activations
    assert RecomputeConfig(recompute_activations=True).recomputes_attention
    assert not RecomputeConfig(checkpoint_activations=True).recomputes_attention
    assert not RecomputeConfig().checkpoint_activations
