"""The layout of a run, in the form that `open_mesh` takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The part of ParallelConfig that the mesh reads."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    distributed_backend: str | None = None
    distributed_timeout_minutes: int = 2
    local_rank: int | None = None
    splits_sequence: bool = False
    async_tensor_model_parallel_allreduce: bool = True
    ring_size: int = 1
    ulysses_size: int = 1
    expert_model_parallel_size: int = 1
    splits_each_expert: bool = True
