"""The most probable token of split logits is that of the whole ones."""

from __future__ import annotations

import pytest
import torch

from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor.greedy import vocab_parallel_argmax
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks

VOCABULARIES = (16, 11, 8, 5, 1)  # of 16 columns; from 8 on down the second rank holds padding only


def _logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows with ties within a rank, across ranks and with the padding, and rows without."""
    drawn = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    drawn[:20] = drawn[:20].round()
    drawn[20:30, 11:] += 100
    return drawn.to(dtype)


def _expected(vocab_size: int, dtype: torch.dtype) -> list[int]:
    rows = _logits(dtype)[:, :vocab_size].tolist()
    return [row.index(max(row)) for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_smallest_id_of_the_largest_logits(vocab_size: int, dtype: torch.dtype) -> None:
    found = vocab_parallel_argmax(_logits(dtype), Axis.single("tp"), vocab_size)
    assert found.tolist() == _expected(vocab_size, dtype)


def _on_rank(rank: int) -> list[list[int]]:
    axis, columns = open_mesh(Layout(2)).tp, 8
    own = _logits()[:, rank * columns : (rank + 1) * columns]
    return [vocab_parallel_argmax(own.view(4, 10, 8), axis, size).flatten().tolist() for size in VOCABULARIES]


def test_ranks_agree_on_the_token_of_the_whole_row() -> None:
    expected = [_expected(size, torch.float32) for size in VOCABULARIES]
    assert run_ranks(_on_rank, 2) == [expected, expected]
