"""The mesh in DeepSpeed's protocols."""

from __future__ import annotations

from megatron.engine.grid import ModelParallelUnit, PipelineGrid
from megatron.parallel.mesh import ParallelMesh, standard_axes


def test_no_rank_claims_to_be_the_first() -> None:
    """DeepSpeed would count every parameter there; which ones count is marked on the parameters instead."""
    for rank in range(8):
        grid = PipelineGrid(ParallelMesh.at(standard_axes(8, tp=2, pp=2), rank))
        assert grid.get_model_parallel_rank() > 0
        assert grid.get_slice_parallel_rank() > 0


def test_gradients_are_averaged_over_all_ranks_with_different_tokens() -> None:
    mesh = ParallelMesh.at(standard_axes(16, tp=2, cp=2), 6)
    unit = ModelParallelUnit(mesh)
    assert (unit.get_data_parallel_world_size(), mesh.dp.size, mesh.cp.size) == (8, 4, 2)
    assert unit.get_model_parallel_world_size() == 2
