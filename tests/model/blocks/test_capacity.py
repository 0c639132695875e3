"""The tokens that an expert with a capacity accepts; ranks that share samples decide together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.model.blocks.capacity import ExpertCapacity
from megatron.model.interface.key_value_cache import BatchCaches
from megatron.model.interface.step_context import StepContext
from megatron.parallel.joining import open_mesh
from megatron.parallel.sequence.split import SequenceSplit
from tests.helpers.layouts import Layout
from tests.helpers.networks import tiny_config
from tests.helpers.ranks import run_ranks

EXPERTS, TOP_K, SAMPLES, LENGTH = 4, 2, 2, 16
POLICIES = ("probs", "position")


def capacity_of(factor: float = 0.7, **changes: Any) -> ExpertCapacity:
    settings = {"num_experts": EXPERTS, "moe_router_topk": TOP_K, "moe_min_capacity": 0, **changes}
    return ExpertCapacity(tiny_config(moe_expert_capacity_factor=factor, **settings), EXPERTS)


def choices() -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of a micro-batch, the first expert the most popular one. Shapes: `[b, s, k]` each."""
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(SAMPLES, LENGTH, EXPERTS, generator=generator) + torch.tensor([0.5, 0.2, 0.0, 0.0])
    return tuple(scores.topk(TOP_K))  # type: ignore[return-value]


def new_context() -> StepContext:
    return StepContext(torch.arange(SAMPLES))


@pytest.mark.parametrize(
    "factor, least, tokens, expected",
    [(1.0, 0, 32, 16), (1.25, 0, 30, 19), (0.01, 0, 30, 1), (0.01, 4, 30, 4), (9.0, 0, 30, 30), (1.0, 99, 30, 30)],
)
def test_the_capacity_is_a_share_of_the_tokens(factor: float, least: int, tokens: int, expected: int) -> None:
    assert capacity_of(factor, moe_min_capacity=least).of_tokens(tokens, training=True) == expected


def test_evaluation_may_have_another_capacity() -> None:
    both = capacity_of(1.0, moe_eval_capacity_factor=2.0)
    assert (both.of_tokens(8, training=True), both.of_tokens(8, training=False)) == (4, 8)
    assert capacity_of(1.0).of_tokens(8, training=False) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_an_expert_takes_the_preferred_tokens(policy: str) -> None:
    weights, experts = (value.flatten(0, 1) for value in choices())
    slots = capacity_of(moe_token_drop_policy=policy).slots(weights, experts, new_context(), training=True)
    assert slots is not None and slots.capacity == 12  # 0.7 * 32 * 2 / 4, rounded up
    for expert in range(EXPERTS):
        asks = experts == expert
        taken, left = asks & slots.kept, asks & ~slots.kept
        assert taken.sum() == min(asks.sum(), slots.capacity)
        assert sorted(slots.indices[taken].tolist()) == list(range(int(taken.sum())))
        if policy == "probs" and left.any():
            assert weights[taken].min() >= weights[left].max()
        if policy == "position" and left.any():
            assert taken.any(1).nonzero().max() < left.any(1).nonzero().min()
    assert not slots.kept.all()


def test_fewer_choices_than_experts() -> None:
    weights, experts = torch.tensor([[0.9, 0.1]]), torch.tensor([[3, 1]])
    slots = capacity_of(1.0).slots(weights, experts, StepContext(torch.arange(1)), training=True)
    assert slots is not None and slots.indices.tolist() == [[0, 0]] and bool(slots.kept.all())


def test_nothing_is_dropped_without_a_capacity_or_where_samples_are_alone() -> None:
    weights, experts = (value.flatten(0, 1) for value in choices())
    free = ExpertCapacity(tiny_config(num_experts=EXPERTS), EXPERTS)
    assert free.slots(weights, experts, new_context(), training=True) is None
    off = capacity_of(disable_moe_token_dropping=True)
    assert off.slots(weights, experts, new_context(), training=True) is None
    for alone in ({"caches": BatchCaches(4)}, {"drops_tokens": False}):
        context = dataclasses.replace(new_context(), **alone)  # type: ignore[arg-type]
        assert capacity_of().slots(weights, experts, context, training=False) is None


def share(rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor, int]]:
    """The places of this rank's tokens, what is kept of them, and the capacity."""
    mesh = open_mesh(Layout(ring_size=2))
    split = SequenceSplit.of(mesh, causal=True, by_document=False)
    assert split is not None
    places = torch.from_numpy(split.positions(LENGTH)[0])
    own = [value[:, places].flatten(0, 1) for value in choices()]
    context = dataclasses.replace(new_context(), split=split)
    found = {}
    for policy in POLICIES:
        slots = capacity_of(moe_token_drop_policy=policy).slots(own[0], own[1], context, training=True)
        assert slots is not None
        for expert in range(EXPERTS):
            taken = slots.indices[(own[1] == expert) & slots.kept]
            assert sorted(taken.tolist()) == list(range(len(taken)))
        found[policy] = (places, slots.kept.view(SAMPLES, -1, TOP_K), slots.capacity)
    return found


def test_ranks_that_share_samples_keep_what_one_rank_keeps() -> None:
    ranks = run_ranks(share, 2)
    weights, experts = (value.flatten(0, 1) for value in choices())
    for policy in POLICIES:
        whole = capacity_of(moe_token_drop_policy=policy).slots(weights, experts, new_context(), training=True)
        assert whole is not None
        kept = whole.kept.view(SAMPLES, LENGTH, TOP_K)
        for places, own, capacity in (rank[policy] for rank in ranks):
            assert capacity == whole.capacity
            assert torch.equal(own, kept[:, places])
