"""From layer specs and a mesh to the module DeepSpeed trains.

That is a `PipelineModule` for several stages, one plain module for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec as DeepSpeedSpec
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from megatron.config.layout import stages_problems
from megatron.errors import ConfigError
from megatron.model.embedding import word_logits
from megatron.model.gpt import BLOCK_PREFIX, WORD_EMBEDDINGS, LayerSpec
from megatron.parallel.layers import VocabParallelEmbedding
from megatron.parallel.mesh import ParallelMesh


def blocks_per_stage(num_layers: int, stages: int) -> list[int]:
    """How many transformer blocks each pipeline stage holds.

    A remainder goes to the stages that carry nothing else: the inner ones first, then the first (embedding), the last
    (head) never before the others.

    Raises:
        ConfigError: there are fewer blocks than stages; such a stage would lack an optimizer parameter group and
            DeepSpeed's collectives would wait for it until they time out.
    """
    for problem in stages_problems(num_layers, stages):
        raise ConfigError(problem)
    counts = [num_layers // stages] * stages
    receivers = [*range(1, stages - 1), 0, stages - 1]
    for stage in receivers[: num_layers % stages]:
        counts[stage] += 1
    return counts


def stage_bounds(specs: Sequence[LayerSpec], stages: int) -> list[int]:
    """The boundaries of the stages in the list of layers: stage `i` runs `specs[bounds[i]:bounds[i + 1]]`.

    What precedes the first block belongs to the first stage, what follows the last block to the last.
    """
    blocks = [index for index, spec in enumerate(specs) if spec.name.startswith(BLOCK_PREFIX)]
    bounds = [0]
    taken = 0
    for count in blocks_per_stage(len(blocks), stages)[:-1]:
        taken += count
        bounds.append(blocks[taken])
    return [*bounds, len(specs)]


class StagedModule(PipelineModule):
    """DeepSpeed's pipeline module, cut where `stage_bounds` says.

    Args:
        loss: from the logits and the targets of a micro batch to its loss.
    """

    def __init__(self, specs: Sequence[LayerSpec], mesh: ParallelMesh, loss: Callable[..., torch.Tensor]) -> None:
        self._bounds = stage_bounds(specs, mesh.pp.size)
        topology = PipeModelDataParallelTopology(num_pp=mesh.pp.size, num_mp=mesh.tp.size, num_dp=mesh.dp.size)

        super().__init__(layers=[_adapt(spec) for spec in specs], topology=topology, loss_fn=loss)

    def _partition_layers(self, method: str = "uniform") -> None:
        """Replaces DeepSpeed's balancing by our boundaries."""
        self.parts = self._bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


class MeshUnit:
    """The questions DeepSpeed asks a Megatron `mpu`, answered from the mesh."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh

    def get_model_parallel_rank(self) -> int:
        """Rank on the tensor-parallel axis."""
        return self._mesh.tp.rank

    def get_model_parallel_world_size(self) -> int:
        """Size of the tensor-parallel axis."""
        return self._mesh.tp.size

    def get_model_parallel_group(self) -> Any:
        """Process group of the tensor-parallel axis."""
        return self._mesh.tp.group

    def get_data_parallel_rank(self) -> int:
        """Rank on the data-parallel axis."""
        return self._mesh.dp.rank

    def get_data_parallel_world_size(self) -> int:
        """Size of the data-parallel axis."""
        return self._mesh.dp.size

    def get_data_parallel_group(self) -> Any:
        """Process group of the data-parallel axis."""
        return self._mesh.dp.group


class _OwnSpec(DeepSpeedSpec):
    """Builds one of our specs when DeepSpeed asks for it."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(nn.Module)
        self.spec = spec

    def build(self, log: bool = False) -> nn.Module:
        return self.spec.build()


class _OwnTiedSpec(TiedLayerSpec):
    """The same for the word weight, which the first and the last stage share."""

    def __init__(self, spec: LayerSpec, key: str, forward_fn: Any) -> None:
        super().__init__(key, nn.Module, forward_fn=forward_fn, tied_weight_attr=["weight"])
        self.spec = spec

    def build(self, log: bool = False) -> nn.Module:
        return self.spec.build()


def _adapt(spec: LayerSpec) -> DeepSpeedSpec:
    if spec.tied_to is not None:
        return _OwnTiedSpec(spec, _module_key(spec.tied_to), _head)
    if spec.name == WORD_EMBEDDINGS:
        return _OwnTiedSpec(spec, _module_key(spec.name), None)
    return _OwnSpec(spec)


def _module_key(name: str) -> str:
    return name.replace(".", "_")  # a ModuleDict key may not hold a dot


def _head(module: VocabParallelEmbedding, inputs: tuple[torch.Tensor, ...] | torch.Tensor) -> torch.Tensor:
    hidden = inputs[0] if isinstance(inputs, tuple) else inputs
    return word_logits(module, hidden)
