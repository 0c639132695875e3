"""Which layers a pipeline rank holds, and what it shares with others."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.engine.pipeline.chunk_pass import ChunkRunner
from megatron.engine.pipeline.chunks import Chunks
from megatron.engine.stage_build import tied_weights
from megatron.errors import ConfigError
from megatron.model.interface.network import LayerSpec, LayerStack, parameter_names
from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.parallel.schedule.actions import Placement
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.networks import build_gpt, tiny_config
from tests.parity.layouts import layout_config
from tests.parity.reference import Recipe

NETWORK_LAYERS = 7


def network(mesh: ParallelMesh) -> list[LayerSpec]:
    recipe = Recipe(num_layers=NETWORK_LAYERS, hidden_size=16)
    return network_layers(layout_config(recipe, (1, 1, 1), 0, []).model, mesh)


@pytest.mark.parametrize("placement", [Placement.loop(2, 1), Placement.loop(2, 3), Placement.v_shape(3)])
def test_the_chunks_of_all_ranks_are_the_network_in_order(placement: Placement) -> None:
    layers = network(ParallelMesh.single())
    names: dict[int, list[str]] = {}
    for rank in range(placement.ranks):
        chunks = Chunks.of(layers, placement, rank)
        assert (chunks.has_first, chunks.has_last) == (rank == 0, rank == placement.owner(placement.chunks - 1))
        for chunk, places in chunks.layers.items():
            names[chunk] = [chunks.specs[place].name for place in places]
    assert [name for chunk in range(placement.chunks) for name in names[chunk]] == [spec.name for spec in layers]


def test_more_chunks_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="7 layers cannot fill 8 pipeline stages"):
        Chunks.of(network(ParallelMesh.single()), Placement.loop(4, 2), 0)


def test_the_first_trained_chunk_is_where_backward_passes_end() -> None:
    layers, placement = network(ParallelMesh.single()), Placement.loop(2, 2)
    own = Chunks.of(layers, placement, 0)
    bottom = parameter_names([own.specs[place] for place in own.layers[0]])

    def first_trained(*frozen: str) -> int:
        return Chunks.of(layers, placement, 1, frozenset(frozen)).first_trained

    assert first_trained() == first_trained(*bottom[1:]) == 0
    assert first_trained(*bottom) == 1
    assert first_trained(*parameter_names(layers)) == 3


def test_every_split_backward_pass_has_a_queue_for_its_matrices() -> None:
    stack = build_gpt(tiny_config(**ARCHITECTURES["deepseek"]))
    specs = tuple(spec for spec, _ in stack.named_layers())
    ChunkRunner(stack, Chunks(1, specs, {0: range(len(specs))}), splits_backward=True)
    queues = {name: module.queue for name, module in stack.named_modules() if hasattr(module, "queue")}
    assert any(name.endswith("linear_kv_down_proj") for name in queues) and all(queues.values())


def shared(placement: Placement, rank: int) -> tuple[list[tuple[str, tuple[int, ...]]], int]:
    """The tied weights of a pipeline rank with their ranks, and how many parameters have the name of the table."""
    mesh = ParallelMesh.at(standard_axes(placement.ranks, pp=placement.ranks), rank)
    layers = network(mesh)
    stack = LayerStack(Chunks.of(layers, placement, rank).specs)
    tied: Any = [(weight.global_name, axis.ranks) for weight, axis in tied_weights(layers, stack, mesh)]
    return tied, sum(each.global_name == "embedding.word_embeddings.weight" for each in stack.parameters())


def test_a_tied_weight_is_one_parameter_where_both_of_its_layers_are() -> None:
    name = "embedding.word_embeddings.weight"
    loop, v_shape = Placement.loop(3, 2), Placement.v_shape(3)
    assert [shared(loop, rank) for rank in range(3)] == [([(name, (0, 2))], 1), ([], 0), ([(name, (0, 2))], 1)]
    assert [shared(v_shape, rank) for rank in range(3)] == [([], 1), ([], 0), ([], 0)]
