"""After an exchange of positions for heads each rank has whole samples, and attention is bit for bit that of one."""

from __future__ import annotations

import pytest
import torch

from megatron.config import ParallelRequest
from megatron.kernels.attention.dense import attention
from megatron.parallel.joining import open_mesh
from megatron.parallel.sequence.ulysses import to_heads, to_positions
from tests.helpers.ranks import run_ranks

HEADS, LENGTH = 12, 32
GROUPS = (12, 6, 4, 3, 2, 1)  # of 4 ranks: divided, and shared by ranks in whole and in part


def states(groups: int) -> list[torch.Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(groups)
    return [torch.randn(2, count, LENGTH, 8, generator=generator) for count in (HEADS, groups, groups)]


def attend(rank: int) -> list[list[torch.Tensor]]:
    """Results and gradients of this rank's positions, for all numbers of groups."""
    axis = open_mesh(ParallelRequest(ds_sequence_parallel_size=4)).sp
    own, results = slice(rank * LENGTH // 4, (rank + 1) * LENGTH // 4), []
    for groups in GROUPS:
        parts = [part[:, :, own].clone().requires_grad_() for part in states(groups)]
        query, key, value = to_heads(*parts, axis)
        assert query.shape == (2, HEADS // 4, LENGTH, 8) and query.shape[1] % key.shape[1] == 0
        out = to_positions(attention(query, key, value, 0.3, causal=True), axis)
        out.sum().backward()
        results.append([out.detach(), *(part.grad for part in parts if part.grad is not None)])
    return results


def test_attention_of_exchanged_heads_is_that_of_one_process() -> None:
    of_ranks = run_ranks(attend, 4)
    for number, groups in enumerate(GROUPS):
        parts = [part.requires_grad_() for part in states(groups)]
        whole = attention(*parts, 0.3, causal=True)  # type: ignore[arg-type]
        whole.sum().backward()
        out, *gradients = (torch.cat(pieces, dim=2) for pieces in zip(*(of[number] for of in of_ranks), strict=True))
        assert torch.equal(out, whole), groups
        for gradient, part in zip(gradients, parts, strict=True):
            assert part.grad is not None
            assert gradient == pytest.approx(part.grad, rel=1e-5, abs=1e-6)
