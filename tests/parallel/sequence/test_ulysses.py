"""After an exchange of positions for heads each rank has whole samples, and attention is bit for bit that of one."""

from __future__ import annotations

import pytest
import torch

from megatron.config import ParallelRequest
from megatron.kernels.attention.bounded import plan_attention
from megatron.kernels.attention.bounds import Bounds, local_bias
from megatron.kernels.attention.dense import attention
from megatron.parallel.joining import open_mesh
from megatron.parallel.sequence.split import SequenceSplit
from megatron.parallel.sequence.ulysses import local_heads, to_heads, to_positions
from tests.helpers.ranks import run_ranks

HEADS, LENGTH, SCALE = 12, 32, 0.3
SIZE = 16  # whole cache lines; a narrower head of a document may be multiplied in another order among fewer heads
GROUPS = (12, 6, 4, 3, 2, 1)  # divided, and shared by ranks in whole and in part
SIZES = (2, 4)  # ranks that exchange
SEGMENTS = torch.arange(LENGTH).div(9, rounding_mode="floor").expand(2, -1)
BOUNDS = {
    "causal": Bounds(),
    "documents": Bounds(SEGMENTS),
    "window": Bounds(window=7),
    "documents-window": Bounds(SEGMENTS, window=4),
    "alibi": Bounds(slopes=tuple(2.0**-place for place in range(HEADS))),
    "alibi-window": Bounds(window=5, slopes=tuple(2.0**-place for place in range(HEADS))),
}
CASES = [(name, 4) for name in BOUNDS] + [("causal", groups) for groups in GROUPS if groups != 4]


def states(groups: int) -> list[torch.Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(groups)
    return [torch.randn(2, count, LENGTH, SIZE, generator=generator) for count in (HEADS, groups, groups)]


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    """Attention of whole samples, in the form that a network would take."""
    plan = plan_attention(query, bounds)
    if plan is not None:
        return plan.attend(query, key, value, SCALE)
    bias = local_bias(query, LENGTH, bounds.window, bounds.slopes) if bounds.slopes else None
    return attention(query, key, value, SCALE, bias=bias, causal=bias is None)


def attend(rank: int) -> dict[int, list[list[torch.Tensor]]]:
    """Results and gradients of this rank's positions, of all cases for each number of ranks that exchange."""
    results: dict[int, list[list[torch.Tensor]]] = {}
    for ranks in SIZES:
        mesh = open_mesh(ParallelRequest(ds_sequence_parallel_size=ranks))
        split = SequenceSplit.of(mesh, causal=True, by_document=False)
        assert split is not None
        own = torch.from_numpy(split.positions(LENGTH)[0])
        results[ranks] = []
        for name, groups in CASES:
            parts = [part[:, :, own].clone().requires_grad_() for part in states(groups)]
            query, key, value = to_heads(*parts, split.ulysses)
            assert query.shape == (2, HEADS // ranks, LENGTH, SIZE) and query.shape[1] % key.shape[1] == 0
            bounds = BOUNDS[name]
            bounds = Bounds(bounds.segment_ids, bounds.window, local_heads(bounds.slopes, split.ulysses))
            out = to_positions(attended(query, key, value, bounds), split.ulysses)
            out.sum().backward()
            results[ranks].append([out.detach(), *(part.grad for part in parts if part.grad is not None)])
    return results


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[int, list[list[torch.Tensor]]]]:
    return run_ranks(attend, max(SIZES))


@pytest.mark.parametrize("ranks", SIZES)
def test_attention_of_exchanged_heads_is_that_of_one_process(
    of_ranks: list[dict[int, list[list[torch.Tensor]]]], ranks: int
) -> None:
    for number, (name, groups) in enumerate(CASES):
        parts = [part.requires_grad_() for part in states(groups)]
        whole = attended(*parts, BOUNDS[name])  # type: ignore[arg-type]
        whole.sum().backward()
        pieces = zip(*(results[ranks][number] for results in of_ranks[:ranks]), strict=True)
        out, *gradients = (torch.cat(part, dim=2) for part in pieces)
        assert torch.equal(out, whole), (name, groups)
        for gradient, part in zip(gradients, parts, strict=True):
            assert part.grad is not None
            torch.testing.assert_close(gradient, part.grad, rtol=1e-5, atol=1e-6)
