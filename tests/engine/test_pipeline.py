"""Where a pipeline is cut, and what DeepSpeed is told about the grid."""

from __future__ import annotations

from itertools import pairwise

import pytest
from torch import nn

from megatron.engine.pipeline import MeshUnit, blocks_per_stage, stage_bounds
from megatron.errors import ConfigError
from megatron.model.gpt import LayerSpec, gpt_layers
from megatron.parallel.mesh import ParallelMesh
from tests.train.samples import model_config

STAGES = range(1, 17)
LAYERS = (*range(1, 33), 47, 96, 105)
PAIRS = [(layers, stages) for layers in LAYERS for stages in STAGES if layers >= stages]


def test_every_block_has_one_stage_and_every_stage_a_block() -> None:
    for layers, stages in PAIRS:
        counts = blocks_per_stage(layers, stages)
        assert len(counts) == stages, (layers, stages)
        assert sum(counts) == layers, (layers, stages)
        assert min(counts) >= 1, (layers, stages)


def test_stages_differ_by_one_block_and_the_last_never_has_more() -> None:
    for layers, stages in PAIRS:
        counts = blocks_per_stage(layers, stages)
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
def test_a_remainder_goes_to_the_inner_stages_first(layers: int, stages: int, counts: list[int]) -> None:
    assert blocks_per_stage(layers, stages) == counts


@pytest.mark.parametrize(("layers", "stages"), [(1, 2), (3, 4), (12, 16)])
def test_fewer_blocks_than_stages_are_refused(layers: int, stages: int) -> None:
    sentence = rf"{layers} layers cannot fill {stages} pipeline stages \(--num-layers {layers}, .*at most {layers} "
    with pytest.raises(ConfigError, match=sentence):
        blocks_per_stage(layers, stages)


def named(*names: str) -> list[LayerSpec]:
    return [LayerSpec(name, nn.Identity) for name in names]


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
        specs = named("embedding.word_embeddings", *(f"decoder.layers.{i}" for i in range(layers)), "output_layer")
        bounds = stage_bounds(specs, stages)
        assert (bounds[0], bounds[-1]) == (0, len(specs)), (layers, stages)
        assert len(bounds) == stages + 1, (layers, stages)
        assert bounds == sorted(set(bounds)), (layers, stages)


def test_bounds_of_too_many_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 layers cannot fill 2 pipeline stages"):
        stage_bounds(named("embedding.word_embeddings", "decoder.layers.0"), 2)


def test_the_grid_of_one_process() -> None:
    unit = MeshUnit(ParallelMesh.single())
    assert (unit.get_model_parallel_rank(), unit.get_model_parallel_world_size()) == (0, 1)
    assert (unit.get_data_parallel_rank(), unit.get_data_parallel_world_size()) == (0, 1)
    assert unit.get_model_parallel_group() is None
    assert unit.get_data_parallel_group() is None
