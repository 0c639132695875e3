"""The blocks that the ranks of a ring compute: every visible pair once, and no block in which nothing is visible."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from megatron.config import ModelConfig
from megatron.model.blocks.attention import SelfAttention
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.parallel.sequence.ring import RingPlan
from megatron.parallel.sequence.split import SequenceSplit
from megatron.parallel.sequence.tiles import Tile, Visibility, tiles_of

LENGTH = 2048
IN_BLOCKS = 1024  # the most tokens along a side of a block whose scores are held


class Case(NamedTuple):
    """What a token sees."""

    seen: Visibility
    documents: bool = False


CASES = {
    "causal": Case(Visibility()),
    "window": Case(Visibility(window=100)),
    "wide-window": Case(Visibility(window=700)),
    "documents": Case(Visibility(), documents=True),
    "documents-window": Case(Visibility(window=60), documents=True),
    "documents-slopes": Case(Visibility(sloped=True), documents=True),
    "in-blocks": Case(Visibility(in_blocks=True)),
    "bidirectional-window": Case(Visibility(bidirectional=True, window=100)),
}


def visible_pairs(case: Case, segments: np.ndarray) -> np.ndarray:
    """Shapes: segments `[s]`; result bool `[s, s]`, of queries and keys."""
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    hidden = distance >= (case.seen.window or LENGTH)
    hidden |= distance <= -(case.seen.window or LENGTH) if case.seen.bidirectional else distance < 0
    return ~hidden & ((segments[:, None] == segments) | (not case.documents))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_visible_pair_is_computed_once_and_no_block_without_one(name: str, ranks: int) -> None:
    case = CASES[name]
    segments = (np.random.default_rng(3).random(LENGTH) < 0.01).cumsum()
    visible, times_computed = visible_pairs(case, segments), np.zeros((LENGTH, LENGTH), np.int8)
    split = SequenceSplit.of(
        ParallelMesh.at(standard_axes(ranks, cp=ranks), 0),
        causal=not case.seen.bidirectional,
        by_document=case.documents,
        window=case.seen.window,
    )
    assert split is not None
    parts = split.parts(LENGTH, segments[None])
    pairs = 0
    for rank in range(ranks):
        tiles = tiles_of(parts, segments[None] if case.documents else None, rank, case.seen)
        for source, tile in ((source, tile) for source, of_source in enumerate(tiles) for tile in of_source):
            block = np.ix_(parts[0, rank, tile.queries], parts[0, source, tile.keys])
            is_computed = np.tri(tile.queries.stop - tile.queries.start, dtype=bool) if tile.causal else True
            times_computed[block] += is_computed
            assert (visible[block] & is_computed).any(), tile
            assert tile.biased or (visible[block] | ~np.bool_(is_computed)).all(), tile  # nothing hides a pair in it
            pairs += tile.pairs
    assert (times_computed[visible] == 1).all() and times_computed.max() == 1
    assert pairs == times_computed.sum()
    if case.seen.block is None:
        assert pairs == visible.sum()
    elif case.seen.window is not None:  # of each query: the window, and on each side less than a block
        sides = 2 if case.seen.bidirectional else 1
        assert pairs < LENGTH * (sides * case.seen.window + 2 * case.seen.block)


@pytest.mark.parametrize("explicit", [False, True])
def test_blocks_are_small_where_their_scores_are_held(explicit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--no-fused-attention` keeps to torch's plain operations, which hold all scores of a block."""
    length, tiles = 16384, list[Tile]()

    def attend(plan: RingPlan, query: torch.Tensor, *_: torch.Tensor | None) -> torch.Tensor:
        tiles.extend(tile for of_source in plan.tiles for tile in of_source)
        return query

    monkeypatch.setattr(RingPlan, "attend", attend)
    mesh = ParallelMesh.at(standard_axes(2, cp=2), 0)
    config = ModelConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        max_position_embeddings=length,
        attention_dropout=0.0,
        vocab_size=8,
        padded_vocab_size=8,
    )
    context = StepContext(
        torch.zeros(1, dtype=torch.int64),
        explicit_attention=explicit,
        split=SequenceSplit.of(mesh, causal=True, by_document=False),
    )
    SelfAttention(config, mesh, 0)(torch.zeros(1, length // 2, 8), context)
    longest = max(part.stop - part.start for tile in tiles for part in (tile.queries, tile.keys))
    assert longest == IN_BLOCKS if explicit else longest > 4 * IN_BLOCKS - 1
