"""Attention of a prefix-trained network: all of a prefix, only the past after it, no other document."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_context import MaskKind, Recompute, StepSettings
from tests.helpers.networks import SEED, build_gpt, tiny_config

LENGTH = 16
SEGMENTS = torch.tensor([[0] * 6 + [1] * 10])
ENDS = {0: 4, 1: 9}  # where the prefix of each document ends
PREFIXES = torch.tensor([[True] * 4 + [False] * 2 + [True] * 3 + [False] * 7])
POSITIONS: dict[str, dict[str, Any]] = {
    "learned": {},
    "rotary": {"position_embedding_type": "rope"},
    "alibi": {"position_embedding_type": "alibi"},
}


def _network(**changes: Any) -> LayerStack:
    return build_gpt(tiny_config(hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3, **changes))


def _changed_rows(network: LayerStack, settings: StepSettings, prefixes: torch.Tensor) -> list[list[int]]:
    """For each place the positions whose logits change when its token does."""
    tokens = torch.randint(0, 101, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    changed = tokens.repeat(LENGTH, 1)
    changed.diagonal().add_(1).remainder_(101)
    rows = torch.cat((tokens, changed))  # [1 + s, s]
    context = settings.context(torch.arange(len(rows)), SEGMENTS.expand_as(rows), prefixes.expand_as(rows))
    with torch.no_grad():
        logits = network(rows, context)
    same = torch.isclose(logits[1:], logits[:1], rtol=1e-5, atol=1e-6).all(dim=-1)  # [changed place, position]
    return [(~row).nonzero().flatten().tolist() for row in same]


@pytest.mark.parametrize("name", POSITIONS)
def test_documents_with_a_prefix_each(name: str) -> None:
    settings = StepSettings(SEED, mask=MaskKind.DOCUMENTS, has_prefixes=True)
    changed = _changed_rows(_network(**POSITIONS[name]), settings, PREFIXES)
    for place in range(LENGTH):
        document = int(SEGMENTS[0, place])
        members = (SEGMENTS[0] == document).nonzero().flatten().tolist()
        first = members[0] if place < ENDS[document] else place
        assert changed[place] == [row for row in members if row >= first]


@pytest.mark.parametrize("name", POSITIONS)
def test_one_prefix_a_sample_ignores_documents(name: str) -> None:
    prefixes = (torch.arange(LENGTH) < 7)[None]
    changed = _changed_rows(_network(**POSITIONS[name]), StepSettings(SEED, has_prefixes=True), prefixes)
    assert changed == [list(range(0 if place < 7 else place, LENGTH)) for place in range(LENGTH)]


def test_a_packed_document_computes_what_it_computes_alone() -> None:
    network = _network(attention_logit_softcap=5.0, num_query_groups=2)
    settings = StepSettings(SEED, mask=MaskKind.DOCUMENTS, restart_positions=True, has_prefixes=True)
    tokens = torch.randint(0, 101, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    packed = network(tokens, settings.context(torch.arange(1), SEGMENTS, PREFIXES))
    for first, last in ((0, 6), (6, LENGTH)):
        part = slice(first, last)
        context = settings.context(torch.arange(1), SEGMENTS[:, part], PREFIXES[:, part])
        torch.testing.assert_close(packed[:, part], network(tokens[:, part], context), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recompute", [Recompute.ATTENTION, Recompute.BLOCKS])
def test_recomputation_and_dropout_keep_the_prefix(recompute: Recompute) -> None:
    network = build_gpt(tiny_config(hidden_dropout=0.1, attention_dropout=0.2))
    tokens = torch.arange(LENGTH)[None]
    found = []
    for mode in (Recompute.NONE, recompute):
        settings = StepSettings(SEED, mode, mask=MaskKind.DOCUMENTS, has_prefixes=True)
        logits = network(tokens, settings.context(torch.arange(1), SEGMENTS, PREFIXES))
        found.append([logits.detach(), *torch.autograd.grad(logits.square().mean(), list(network.parameters()))])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
