"""DeepSpeed uses the process groups of the mesh: it creates none itself, so all of them have the run's timeout."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import train_here, write_tiny_corpus

TORCH = Path(torch.__file__).parent


def _askers(rank: int, flags: list[str]) -> tuple[int, set[str]]:
    """The exit code of a run, and the files that called `new_group` in it."""
    create, askers = distributed_c10d._new_group_with_tag, set()

    def recorded(*arguments: Any, **options: Any) -> Any:
        callers = (Path(frame.filename) for frame in reversed(traceback.extract_stack()[:-1]))
        askers.add(next(path.name for path in callers if TORCH not in path.parents))
        return create(*arguments, **options)

    distributed_c10d._new_group_with_tag = recorded
    return train_here(rank, flags)[0], askers


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2},
        {"zero_stage": 3},
    ],
    ids=["pipeline and tensor", "data"],
)
def test_only_the_mesh_creates_groups(layout: dict[str, int], tmp_path: Path) -> None:
    flags = write_tiny_corpus(tmp_path).flags(train_iters=1, global_batch_size=8, run_dir=tmp_path / "run", **layout)
    for code, askers in run_ranks(_askers, 4, flags):
        assert (code, askers) == (0, {"mesh.py"})
