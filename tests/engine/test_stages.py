"""Where a pipeline is cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from torch import nn

from megatron.config.layout import blocks_per_stage
from megatron.engine.stages import stage_bounds
from megatron.errors import ConfigError
from megatron.model.gpt import gpt_layers
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.network import LayerKind, LayerSpec
from megatron.parallel.mesh import ParallelMesh
from tests.train.samples import model_config

STAGES = range(1, 17)
LAYERS = (*range(1, 33), 47, 96, 105)
PAIRS = [(layers, stages) for layers in LAYERS for stages in STAGES if layers >= stages]


def test_every_block_has_one_stage_and_every_stage_a_block() -> None:
    for layers, stages in PAIRS:
        counts = blocks_per_stage([1] * layers, stages)
        assert len(counts) == stages, (layers, stages)
        assert sum(counts) == layers, (layers, stages)
        assert min(counts) >= 1, (layers, stages)


def test_stages_differ_by_one_block_and_the_last_never_has_more() -> None:
    for layers, stages in PAIRS:
        counts = blocks_per_stage([1] * layers, stages)
        assert max(counts) - min(counts) <= 1, (layers, stages)
        assert counts[-1] == min(counts), (layers, stages)
        assert counts[0] <= max(counts[1:-1], default=counts[0]), (layers, stages)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (4, 1, [4]),
        (8, 4, [2, 2, 2, 2]),
        (5, 2, [3, 2]),
        (5, 4, [1, 2, 1, 1]),
        (6, 4, [1, 2, 2, 1]),
        (7, 4, [2, 2, 2, 1]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_a_remainder_goes_to_the_middle_stages_first(layers: int, stages: int, counts: list[int]) -> None:
    assert blocks_per_stage([1] * layers, stages) == counts


@pytest.mark.parametrize(("layers", "stages"), [(1, 2), (3, 4), (12, 16)])
def test_fewer_blocks_than_stages_are_rejected(layers: int, stages: int) -> None:
    sentence = rf"{layers} layers cannot fill {stages} pipeline stages \(--num-layers {layers}, .*at most {layers} "
    with pytest.raises(ConfigError, match=sentence):
        blocks_per_stage([1] * layers, stages)


def test_blocks_of_different_costs_are_balanced() -> None:
    generator = random.Random(0)
    for _ in range(200):
        costs = [generator.randint(1, 20) for _ in range(generator.randint(2, 9))]
        stages = generator.randint(1, len(costs))
        counts = blocks_per_stage(costs, stages)
        assert (len(counts), sum(counts), min(counts) >= 1) == (stages, len(costs), True)
        assert dearest(costs, counts) == min(dearest(costs, other) for other in compositions(len(costs), stages))


def dearest(costs: list[int], counts: Sequence[int]) -> int:
    """Cost of the most expensive stage."""
    ends = list(itertools.accumulate(counts, initial=0))
    return max(sum(costs[a:b]) for a, b in pairwise(ends))


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of `parts` positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


def layers_of(kinds: Sequence[LayerKind]) -> list[LayerSpec]:
    """Layers whose names say nothing about what they are."""
    return [LayerSpec(f"x{place}", kind, LayerCost(5), nn.Identity) for place, kind in enumerate(kinds)]


def test_bounds_keep_embeddings_first_and_the_head_last() -> None:
    specs = gpt_layers(model_config(num_layers=5), ParallelMesh.single())
    bounds = stage_bounds(specs, 3)
    stages = [[spec.name for spec in specs[a:b]] for a, b in pairwise(bounds)]
    assert stages == [
        ["embedding.word_embeddings", "embedding.position_embeddings", "decoder.layers.0", "decoder.layers.1"],
        ["decoder.layers.2", "decoder.layers.3"],
        ["decoder.layers.4", "decoder.final_layernorm", "output_layer"],
    ]


def test_bounds_cover_every_layer_once() -> None:
    for layers, stages in PAIRS:
        specs = layers_of([LayerKind.EMBEDDING, *[LayerKind.BLOCK] * layers, LayerKind.NORM, LayerKind.HEAD])
        bounds = stage_bounds(specs, stages)
        assert (bounds[0], bounds[-1]) == (0, len(specs)), (layers, stages)
        assert len(bounds) == stages + 1, (layers, stages)
        assert bounds == sorted(set(bounds)), (layers, stages)


def test_bounds_of_too_many_stages_are_rejected() -> None:
    with pytest.raises(ConfigError, match="1 layers cannot fill 2 pipeline stages"):
        stage_bounds(layers_of([LayerKind.EMBEDDING, LayerKind.BLOCK]), 2)


def test_stages_may_be_left_without_a_block() -> None:
    kinds = [LayerKind.EMBEDDING, LayerKind.BLOCK, LayerKind.BLOCK, LayerKind.NORM, LayerKind.HEAD]
    assert stage_bounds(layers_of(kinds), 4, may_be_empty=True) == [0, 2, 3, 3, 5]
    assert stage_bounds(layers_of(kinds), 2, may_be_empty=True) == stage_bounds(layers_of(kinds), 2)
