"""The mesh as DeepSpeed asks for it: its `mpu` protocol and the grid of its pipeline engine.

DeepSpeed would create process groups of its own for every rank of the world; these classes answer with the mesh's.
"""

from __future__ import annotations

from typing import Any

from megatron.parallel.mesh import ParallelMesh

# DeepSpeed counts a parameter's gradient on the first model-parallel rank, and elsewhere only where the parameter is
# marked as split. The engine marks exactly those that this rank accounts for, so no rank calls itself the first.
_NOT_THE_FIRST = 1


class ModelParallelUnit:
    """The questions DeepSpeed asks a Megatron `mpu`."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh

    def get_model_parallel_rank(self) -> int:
        """Which parameters this rank counts besides the marked ones; see `_NOT_THE_FIRST`."""
        return _NOT_THE_FIRST

    def get_model_parallel_world_size(self) -> int:
        """Ranks that share one copy of the model."""
        return self._mesh.model.size

    def get_model_parallel_group(self) -> Any:
        """Process group of the ranks that share one copy of the model."""
        return self._mesh.model.group

    def get_data_parallel_rank(self) -> int:
        """Position among the ranks whose gradients are averaged."""
        return self._mesh.gradient.rank

    def get_data_parallel_world_size(self) -> int:
        """Ranks whose gradients are averaged."""
        return self._mesh.gradient.size

    def get_data_parallel_group(self) -> Any:
        """Process group of the ranks whose gradients are averaged."""
        return self._mesh.gradient.group


class PipelineGrid(ModelParallelUnit):
    """What DeepSpeed's pipeline engine reads of its `PipelineParallelGrid`."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__(mesh)
        self.global_rank = mesh.world.rank
        self.pipe_parallel_size = mesh.pp.size
        self.data_parallel_size = mesh.gradient.size
        self.data_parallel_id = mesh.gradient.rank
        self.model_parallel_size = mesh.tp.size
        self.pp_group = list(mesh.pp.ranks)

    def get_global_rank(self) -> int:
        """Rank in the world."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """The stage of this rank."""
        return self._mesh.pp.rank

    def stage_to_global(self, stage_id: int) -> int:
        """The global rank that holds a stage of this rank's pipeline."""
        return self._mesh.pp.ranks[stage_id]

    def get_pipe_parallel_rank(self) -> int:
        """The stage of this rank."""
        return self._mesh.pp.rank

    def get_pipe_parallel_world_size(self) -> int:
        """Number of stages."""
        return self._mesh.pp.size

    def get_pipe_parallel_group(self) -> Any:
        """Process group of this rank's pipeline."""
        return self._mesh.pp.group

    def get_slice_parallel_rank(self) -> int:
        """See `get_model_parallel_rank`."""
        return _NOT_THE_FIRST

    def get_slice_parallel_world_size(self) -> int:
        """Size of the tensor-parallel axis."""
        return self._mesh.tp.size

    def get_slice_parallel_group(self) -> Any:
        """Process group of the tensor-parallel axis."""
        return self._mesh.tp.group
