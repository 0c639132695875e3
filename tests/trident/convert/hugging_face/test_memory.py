"""A conversion holds slices, not the model: what a process holds at most is measured in one of its own."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from megatron.checkpoint import write_snapshot
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.snapshot import TORCH_TYPES
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.ranks import run_ranks
from tests.trident.convert.sparse_model import write_sparse_model
from trident.convert.hugging_face import streaming
from trident.convert.hugging_face.registry import family_of
from trident.convert.hugging_face.streaming import (
    CheckpointSource,
    ImportedPieces,
    check_weights,
    exported_values,
    network_shapes,
)
from trident.convert.hugging_face.table.tensors import bind, parts_by_tensor, their_shapes
from trident.convert.hugging_face.weight_files import (
    PlannedTensor,
    plan_files,
    read_json_file,
    read_weight_files,
    write_files,
)

SLICE_BYTES = 4 * 2**20


def held_bytes() -> int:
    """The most that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def convert_both_ways(rank: int, source: str, folder: str) -> tuple[int, int]:
    """Streams a model in and out; returns by how much each made the process grow."""
    config = read_json_file(Path(source) / "config.json", "")
    family = family_of(config)
    tensors = bind(family.tensors, network_shapes(family.read_config(config)))
    stored = read_weight_files(Path(source))
    check_weights(family, tensors, stored)
    streaming.SLICE_BYTES = SLICE_BYTES  # of this process
    before = held_bytes()
    pieces = ImportedPieces(tensors, stored)
    checkpoint = write_snapshot(Path(folder), 0, pieces.snapshot(), {}, ParallelMesh.single())
    between = held_bytes()
    weights, parts = CheckpointSource(checkpoint, read_manifest(checkpoint)), parts_by_tensor(tensors)
    planned = [PlannedTensor(name, "BF16", shape) for name, shape in their_shapes(tensors).items()]
    write_files(
        Path(folder),
        plan_files(planned, 10**12),
        lambda tensor: exported_values(weights, parts[tensor.name], TORCH_TYPES[tensor.dtype]),
    )
    return between - before, held_bytes() - between


@pytest.mark.full
@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    size_bytes = write_sparse_model(source, layers=2, hidden=2048, inner=8192)
    assert size_bytes > 240 * 2**20
    ((imported, exported),) = run_ranks(convert_both_ways, 1, str(source), str(tmp_path / "out"))
    assert imported < 80 * 2**20, "two slices, two chunks of the writer and some change"
    assert exported < 80 * 2**20
    written, given = (read_weight_files(folder) for folder in (tmp_path / "out", source))
    assert {name: tensor.shape for name, tensor in written.items()} == {name: given[name].shape for name in given}
