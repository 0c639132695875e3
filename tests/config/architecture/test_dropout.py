"""Probabilities of dropout that 16 bits cannot represent are refused, with those that can be had."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.architecture.dropout import DROPOUT_STEPS, dropout_problems
from megatron.kernels.dropout_add import dropout_add
from megatron.parallel.rng import hidden_dropout, hidden_keys


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.001, 0.9, 0.999, 1 / DROPOUT_STEPS, 1 - 1 / DROPOUT_STEPS])
def test_what_is_usual_or_exact_is_accepted(probability: float) -> None:
    assert not list(dropout_problems("--hidden-dropout", probability))


@given(
    probability=st.one_of(st.floats(0, 1, exclude_max=True), st.floats(0, 1e-3), st.floats(0.999, 1, exclude_max=True))
)
def test_every_suggestion_is_accepted(probability: float) -> None:
    for sentence in dropout_problems("--x", probability):
        for text in sentence.partition("Use ")[2].rstrip(".").split(" or "):
            assert not list(dropout_problems("--x", float(text))), text


@pytest.mark.parametrize("probability", [0.001, 0.5, 0.999])
def test_the_share_that_is_dropped_is_the_one_asked_for(probability: float) -> None:
    x = torch.ones(4, 512, 512)
    out = dropout_add(x, hidden_dropout(probability, keys=hidden_keys(3, 1), sample_ids=torch.arange(4), length=512))
    assert float((out == 0).float().mean()) == pytest.approx(probability, rel=0.1, abs=3e-4)
    assert float(out.mean()) == pytest.approx(1.0, abs=0.05)
