"""Where a pipeline is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from torch import nn

from megatron.engine.pipeline.chunks import stage_bounds
from megatron.model.costs import chunk_flops, token_work
from megatron.model.gpt import gpt_layers
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.network import LayerKind, LayerSpec
from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.division import BY_COST, EVENLY
from tests.train.samples import model_config


def layers_of(kinds: Sequence[LayerKind]) -> list[LayerSpec]:
    """Layers whose names say nothing about what they are."""
    return [LayerSpec(f"x{place}", kind, LayerCost(5), nn.Identity) for place, kind in enumerate(kinds)]


def test_bounds_keep_embeddings_first_and_the_head_last() -> None:
    specs = gpt_layers(model_config(num_layers=5), ParallelMesh.single())
    bounds = stage_bounds(specs, Placement.loop(3, 1), EVENLY)
    stages = [[spec.name for spec in specs[a:b]] for a, b in pairwise(bounds)]
    assert stages == [
        ["embedding.word_embeddings", "embedding.position_embeddings", "decoder.layers.0", "decoder.layers.1"],
        ["decoder.layers.2", "decoder.layers.3"],
        ["decoder.layers.4", "decoder.final_layernorm", "output_layer"],
    ]


@pytest.mark.parametrize("changes", [{}, {"bidirectional": True, "masked_lm_head": True}, {"num_experts": 4}])
@pytest.mark.parametrize("placement", [Placement.loop(4, 1), Placement.loop(2, 2), Placement.v_shape(4)])
def test_a_large_vocabulary_takes_blocks_off_the_last_chunk(placement: Placement, changes: dict[str, object]) -> None:
    """16 blocks of 12 h^2 parameters, and a head of as many as three of them."""
    model = model_config(num_layers=16, padded_vocab_size=36 * 12, **changes)
    work = token_work(model, 8, 0.5 if model.bidirectional else 1.0)
    specs = network_layers(model, ParallelMesh.single())
    bounds = stage_bounds(specs, placement, BY_COST, work)
    flops = [spec.cost.flops(work.pairs) for spec in specs]
    flops[-1] = int(work.head_share * flops[-1])
    chunks = tuple(sum(flops[a:b]) for a, b in pairwise(bounds))
    assert chunks == chunk_flops(model, work, placement, BY_COST)  # what the summary and a plan count
    even = stage_bounds(specs, placement, EVENLY, work)
    assert bounds[-1] - bounds[-2] < even[-1] - even[-2]
    dearest, before = (
        max(
            sum(sum(flops[cut[chunk] : cut[chunk + 1]]) for chunk in placement.chunks_of(rank))
            for rank in range(placement.ranks)
        )
        for cut in (bounds, even)
    )
    assert dearest < before


def test_a_network_without_operations_is_divided_by_parameters() -> None:
    kinds = [LayerKind.EMBEDDING, *[LayerKind.BLOCK] * 4, LayerKind.HEAD]
    specs = [
        LayerSpec(f"x{place}", kind, LayerCost(parameters), nn.Identity)
        for place, (kind, parameters) in enumerate(zip(kinds, (90, 6, 1, 1, 4, 90), strict=True))
    ]
    assert stage_bounds(specs, Placement.loop(2, 1)) == [0, 2, 6]


def test_stages_may_be_left_without_a_block() -> None:
    kinds = [LayerKind.EMBEDDING, LayerKind.BLOCK, LayerKind.BLOCK, LayerKind.NORM, LayerKind.HEAD]
    two, four = Placement.loop(2, 1), Placement.loop(4, 1)
    assert stage_bounds(layers_of(kinds), four, may_be_empty=True) == [0, 2, 3, 3, 5]
    assert stage_bounds(layers_of(kinds), two, may_be_empty=True) == stage_bounds(layers_of(kinds), two)
