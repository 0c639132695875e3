"""Adapters of the mesh to DeepSpeed: its `mpu` protocol and the grid of its pipeline engine.

Without them, DeepSpeed would create its own process groups over all ranks.
"""

from __future__ import annotations

from megatron.parallel.mesh import Axis, ParallelMesh

# In the gradient norm, DeepSpeed counts all parameters on the first model-parallel rank, and on the others those marked
# as split. The engine marks exactly the parameters that each rank counts, so no rank may be the first.
_NOT_FIRST_RANK = 1


class ModelParallelUnit:
    """The methods that DeepSpeed calls on a Megatron `mpu`: `get_data_parallel_rank()` and so on."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._add_getters("model_parallel", mesh.model, _NOT_FIRST_RANK)
        self._add_getters("data_parallel", mesh.gradient, mesh.gradient.rank)

    def _add_getters(self, name: str, axis: Axis, rank: int) -> None:
        for noun, value in (("rank", rank), ("world_size", axis.size), ("group", axis.group)):
            setattr(self, f"get_{name}_{noun}", lambda value=value: value)


class PipelineGrid(ModelParallelUnit):
    """The part of `PipelineParallelGrid` that DeepSpeed's pipeline engine uses."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__(mesh)
        self._add_getters("pipe_parallel", mesh.pp, mesh.pp.rank)
        self._add_getters("slice_parallel", mesh.tp, _NOT_FIRST_RANK)
        self.global_rank = mesh.world.rank
        self.pipe_parallel_size = mesh.pp.size
        self.data_parallel_size = mesh.gradient.size
        self.data_parallel_id = mesh.gradient.rank
        self.model_parallel_size = mesh.tp.size
        self.pp_group = list(mesh.pp.ranks)

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_stage_id(self) -> int:
        return self._mesh.pp.rank

    def stage_to_global(self, stage_id: int) -> int:
        """The global rank of a stage of this rank's pipeline."""
        return self._mesh.pp.ranks[stage_id]
