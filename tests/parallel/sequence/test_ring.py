"""Attention between ranks is attention of one process, forward and backward, whatever bounds it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from megatron.config import ParallelRequest
from megatron.kernels.attention.bounds import local_bias
from megatron.kernels.attention.dense import repeated_heads
from megatron.kernels.attention.partial import PartialAttention
from megatron.parallel.joining import open_mesh
from megatron.parallel.sequence.ring import RingPlan
from megatron.parallel.sequence.split import SequenceSplit
from megatron.parallel.sequence.tiles import Visibility
from megatron.parallel.sequence.ulysses import local_heads, to_heads, to_positions
from tests.helpers.ranks import run_ranks

LENGTH, BATCH, SIZE, SCALE = 256, 2, 16, 0.25
SLOPES = (0.5, 0.25, 0.125, 0.0625)


class Case(NamedTuple):
    """What attention is bounded by."""

    documents: bool = False
    window: int | None = None
    slopes: tuple[float, ...] = ()
    softcap: float | None = None
    bidirectional: bool = False
    groups: int = 4
    dtype: torch.dtype = torch.float32
    explicit: bool = False


CASES = {
    "causal": Case(),
    "groups": Case(groups=2),
    "one-group": Case(groups=1),
    "explicit": Case(groups=2, explicit=True),
    "bf16": Case(dtype=torch.bfloat16),
    "documents": Case(documents=True, groups=2),
    "documents-bf16": Case(documents=True, dtype=torch.bfloat16),
    "window": Case(window=40),
    "wide-window": Case(window=150),
    "documents-window": Case(documents=True, window=20),
    "slopes": Case(slopes=SLOPES, groups=2),
    "documents-slopes": Case(documents=True, slopes=SLOPES),
    "softcap": Case(softcap=2.0),
    "bidirectional": Case(bidirectional=True, documents=True),
    "bidirectional-window": Case(bidirectional=True, window=30),
}


def inputs(case: Case) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Queries, keys, values; segments; the gradient of the result."""
    generator = torch.Generator().manual_seed(5)
    heads = (4, case.groups, case.groups)
    states = [torch.randn(BATCH, count, LENGTH, SIZE, generator=generator).to(case.dtype) for count in heads]
    ends = torch.rand(BATCH, LENGTH, generator=generator) < 0.03
    return states, ends.long().cumsum(1), torch.randn(BATCH, 4, LENGTH, SIZE, generator=generator).to(case.dtype)


def reference(case: Case) -> list[torch.Tensor]:
    """The result and the three gradients, in float64."""
    states, segments, gradient = inputs(case)
    query, key, value = (part.double().requires_grad_() for part in states)
    bias = local_bias(query, LENGTH, case.window, case.slopes, bidirectional=case.bidirectional)
    if case.documents:
        bias = bias.masked_fill((segments.unsqueeze(2) != segments.unsqueeze(1)).unsqueeze(1), -torch.inf)
    scores = SCALE * query @ repeated_heads(key, 4).transpose(2, 3)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    out = (scores + bias).softmax(-1) @ repeated_heads(value, 4)
    out.backward(gradient.double())
    return [out.detach(), *(part.grad for part in (query, key, value) if part.grad is not None)]


def attend(
    rank: int, names: list[str], sizes: dict[str, Any]
) -> dict[str, tuple[torch.Tensor, list[torch.Tensor], int]]:
    """Each case on one of several ranks: its places, result, gradients, and the pairs that it computed."""
    mesh = open_mesh(ParallelRequest(**sizes))
    results = {}
    for name in names:
        case = CASES[name]
        states, segments, gradient = inputs(case)
        bounds = {"by_document": case.documents, "window": case.window}
        split = SequenceSplit.of(mesh, causal=not case.bidirectional, **bounds)  # type: ignore[arg-type]
        assert split is not None
        places = torch.from_numpy(split.positions(LENGTH, segments.numpy())).expand(BATCH, -1)
        query, key, value = (_at(part, places).requires_grad_() for part in states)
        slopes = local_heads(case.slopes, split.ulysses)
        form = PartialAttention(SCALE, case.softcap, case.explicit)
        seen = Visibility(case.bidirectional, case.window, bool(slopes), form.holds_scores(query))
        plan = RingPlan.of(split, LENGTH, segments if case.documents else None, form, seen, slopes, mesh.device)
        exchanged = to_heads(query, key, value, split.ulysses)
        out = to_positions(plan.attend(*exchanged), split.ulysses)
        out.backward(_at(gradient, places))
        gradients = [part.grad for part in (query, key, value) if part.grad is not None]
        results[name] = (places, [out.detach(), *gradients], plan.pairs)
    return results


def visible_pairs(name: str) -> int:
    """Of what a plan counts: one sample if all are divided alike."""
    if name == "causal":
        return LENGTH * (LENGTH + 1) // 2
    return sum(int((length * (length + 1) // 2).sum()) for length in map(torch.bincount, inputs(CASES[name])[1]))


def _at(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    index = places[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index).detach()


RING_4 = {"context_parallel_size": 4}
RING_2 = {"context_parallel_size": 2}
MIXED = {
    "context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)
}  # fmt: skip


@pytest.mark.parametrize(("world", "sizes"), [(4, RING_4), (2, RING_2), (4, MIXED)], ids=["4", "2", "2x2"])
def test_ranks_attend_as_one_process(world: int, sizes: dict[str, Any]) -> None:
    of_ranks = run_ranks(attend, world, list(CASES), sizes)
    for name, case in CASES.items():
        wanted = reference(case)
        limits = (5e-7, 1e-6, 1e-6, 1e-6) if case.dtype == torch.float32 else (4e-3, 1.6e-2, 1.6e-2, 1.6e-2)
        for part, limit in enumerate(limits):
            whole = torch.zeros_like(wanted[part])
            for results in of_ranks:
                places, parts, _ = results[name]
                index = places[:, None, :, None].expand_as(parts[part])
                whole.scatter_add_(2, index, parts[part].double())
            worst = float((whole - wanted[part]).abs().max() / wanted[part].abs().max())
            assert worst < limit, (name, part, worst)
        pairs = [results[name][2] for results in of_ranks]
        if name in ("causal", "documents"):
            assert max(pairs) / (sum(pairs) / world) < (1.02 if name == "causal" else 1.1)
            assert sum(pairs) == visible_pairs(name) * (2 if sizes is MIXED else 1)  # nothing that is not seen
