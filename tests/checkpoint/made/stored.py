"""Small checkpoints of one process with a complete record."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.checkpoint import SaveOptions, save
from megatron.checkpoint.recovery import OpenCheckpoint
from megatron.config import ModelConfig
from megatron.parallel.mesh import ParallelMesh
from tests.checkpoint.made.fake_pieces import State, cut_for_ranks
from tests.checkpoint.made.records import make_record
from tests.helpers.networks import tiny_config


def save_checkpoint(
    folder: Path,
    state: State,
    step: int = 4,
    model: ModelConfig | None = None,
    seed: int = 0,
    chunk_bytes: int = 256,
    check_finite: bool = True,
    **record: Any,
) -> OpenCheckpoint:
    """Saves a state, cut at random, as the checkpoint of a run of a network, and opens it."""
    config = {
        "model": dataclasses.asdict(model or tiny_config()),
        "saving": {"no_save_optim": False, "save": str(folder)},
        "provenance": {"model.num_layers": "given", "saving.save": "default"},
    }
    made = make_record(step, **{"config": config, **record})
    pieces = cut_for_ranks(state, 1, seed)[0]
    mesh = ParallelMesh.single()
    path = save(
        folder, step, pieces, made.to_json(), mesh, SaveOptions(chunk_bytes=chunk_bytes, check_finite=check_finite)
    )
    return OpenCheckpoint.newest(path)
