"""The mesh in DeepSpeed's protocols."""

from __future__ import annotations

from megatron.engine.grid import ModelParallelUnit, PipelineGrid
from megatron.parallel.mesh import ParallelMesh, standard_axes


def test_the_unit_of_one_process() -> None:
    unit = ModelParallelUnit(ParallelMesh.single())
    assert unit.get_model_parallel_world_size() == 1
    assert (unit.get_data_parallel_rank(), unit.get_data_parallel_world_size()) == (0, 1)
    assert unit.get_model_parallel_group() is None
    assert unit.get_data_parallel_group() is None


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


def test_the_grid_of_a_pipeline() -> None:
    mesh = ParallelMesh.at(standard_axes(8, tp=2, pp=2), 6)  # stage 1, replica 1, tensor rank 0
    grid = PipelineGrid(mesh)
    assert (grid.get_global_rank(), grid.get_stage_id(), grid.get_pipe_parallel_rank()) == (6, 1, 1)
    assert (grid.pipe_parallel_size, grid.data_parallel_size, grid.data_parallel_id) == (2, 2, 1)
    assert (grid.model_parallel_size, grid.get_slice_parallel_world_size()) == (2, 2)
    assert grid.get_model_parallel_world_size() == 4
    assert (grid.pp_group, [grid.stage_to_global(stage) for stage in (0, 1)]) == ([2, 6], [2, 6])
    assert grid.get_pipe_parallel_world_size() == 2
    assert grid.get_pipe_parallel_group() is None and grid.get_slice_parallel_group() is None
