"""Which layers a pipeline rank holds, and what it shares with others."""

from __future__ import annotations

from megatron.engine.pipeline.chunk_pass import ChunkRunner
from megatron.engine.pipeline.chunks import Chunks
from megatron.model.interface.network import LayerSpec, parameter_names
from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.schedule.actions import Placement
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.networks import build_gpt, tiny_config
from tests.parity.layouts import layout_config
from tests.parity.reference import Recipe

NETWORK_LAYERS = 7


def network(mesh: ParallelMesh) -> list[LayerSpec]:
    recipe = Recipe(num_layers=NETWORK_LAYERS, hidden_size=16)
    return network_layers(layout_config(recipe, (1, 1, 1), 0, []).model, mesh)


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
