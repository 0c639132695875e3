"""The mesh in the two forms that DeepSpeed expects: its `mpu` protocol and the grid of its pipeline engine.

Without these classes, DeepSpeed would create process groups of its own for every rank of the world.
"""

from __future__ import annotations

from typing import Any

from megatron.parallel.mesh import ParallelMesh

# For the gradient norm, DeepSpeed counts every parameter on the first model-parallel rank, and on the others only those
# marked as split. The engine marks exactly the parameters that each rank counts, so no rank may claim to be the first.
_NOT_FIRST_RANK = 1


class ModelParallelUnit:
    """Implements the methods that DeepSpeed calls on a Megatron `mpu`."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh

    def get_model_parallel_rank(self) -> int:
        """Never 0, so that DeepSpeed counts only marked parameters; see `_NOT_FIRST_RANK`."""
        return _NOT_FIRST_RANK

    def get_model_parallel_world_size(self) -> int:
        """Number of ranks that hold one model replica."""
        return self._mesh.model.size

    def get_model_parallel_group(self) -> Any:
        """Process group of the ranks that hold one model replica."""
        return self._mesh.model.group

    def get_data_parallel_rank(self) -> int:
        """Position among the ranks that average gradients."""
        return self._mesh.gradient.rank

    def get_data_parallel_world_size(self) -> int:
        """Number of ranks that average gradients."""
        return self._mesh.gradient.size

    def get_data_parallel_group(self) -> Any:
        """Process group of the ranks that average gradients."""
        return self._mesh.gradient.group


class PipelineGrid(ModelParallelUnit):
    """Implements what DeepSpeed's pipeline engine uses of its `PipelineParallelGrid`."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__(mesh)
        self.global_rank = mesh.world.rank
        self.pipe_parallel_size = mesh.pp.size
        self.data_parallel_size = mesh.gradient.size
        self.data_parallel_id = mesh.gradient.rank
        self.model_parallel_size = mesh.tp.size
        self.pp_group = list(mesh.pp.ranks)

    def get_global_rank(self) -> int:
        """This process's global rank."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """The stage of this rank."""
        return self._mesh.pp.rank

    def stage_to_global(self, stage_id: int) -> int:
        """The global rank of a stage of this rank's pipeline."""
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
        return _NOT_FIRST_RANK

    def get_slice_parallel_world_size(self) -> int:
        """Size of the tensor-parallel axis."""
        return self._mesh.tp.size

    def get_slice_parallel_group(self) -> Any:
        """Process group of the tensor-parallel axis."""
        return self._mesh.tp.group
