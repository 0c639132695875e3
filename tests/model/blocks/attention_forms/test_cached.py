"""Attention to cached keys: which keys are visible, and the bias of the scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.errors import ConfigError
from megatron.model.blocks.attention_forms.cached import cached_bias, visible_keys
from megatron.model.blocks.attention_forms.form import Scoring
from megatron.model.interface.step_context import MaskKind, StepContext
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import tiny_config

CONTEXT = StepContext(torch.arange(1))
INFINITE = float("inf")


def scoring(window: int | None = None, **changes: Any) -> Scoring:
    return Scoring(tiny_config(attention_window=window, **changes), ParallelMesh.single(), 0)


def query_of(length: int) -> torch.Tensor:
    return torch.zeros(1, 2, length, 4)


def test_only_keys_within_the_window_of_some_query_are_kept() -> None:
    keys = torch.arange(10.0).view(1, 1, 10, 1)
    assert visible_keys(keys, 1, 3).flatten().tolist() == [7, 8, 9]
    assert visible_keys(keys, 4, 3).flatten().tolist() == [4, 5, 6, 7, 8, 9]
    assert visible_keys(keys, 1, None) is keys and visible_keys(keys, 8, 3) is keys


def test_no_bias_where_the_causal_mask_suffices() -> None:
    for length, keys, window in ((1, 5, None), (1, 5, 5), (4, 4, None), (4, 4, 4)):
        assert cached_bias(CONTEXT, query_of(length), keys, scoring(window)) is None


def test_masks_and_distances_count_from_the_last_key() -> None:
    bias = cached_bias(CONTEXT, query_of(2), 4, scoring(2))
    assert bias is not None
    assert bias[0, 0].tolist() == [[-INFINITE, 0, 0, -INFINITE], [-INFINITE, -INFINITE, 0, 0]]
    alibi = scoring(num_attention_heads=2, position_embedding_type="alibi")  # slopes 1/16 and 1/256
    sloped = cached_bias(CONTEXT, query_of(1), 3, alibi)
    assert sloped is not None
    assert sloped[0, :, 0].tolist() == [[-2 / 16, -1 / 16, 0], [-2 / 256, -1 / 256, 0]]


def test_documents_cannot_be_separated() -> None:
    context = StepContext(torch.arange(1), mask=MaskKind.DOCUMENTS)
    with pytest.raises(ConfigError, match="--reset-attention-mask"):
        cached_bias(context, query_of(1), 2, scoring())
