"""The file of one rank: read by the safetensors library, streamed, from any device."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatron.checkpoint import SaveOptions, load, read_tensors, save
from megatron.checkpoint.saving import write_pieces
from megatron.checkpoint.snapshot import take_snapshot
from megatron.checkpoint.storage import Storage
from megatron.errors import NumericsError, StorageError
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import PieceKey
from tests.checkpoint.made.saved_state import MESH


def test_the_safetensors_library_reads_the_pieces(tmp_path: Path) -> None:
    wide = torch.arange(5, dtype=torch.float32)
    narrow = torch.arange(3, dtype=torch.bfloat16)
    pieces = [
        (PieceKey("narrow", "weight", (3,), (0,), (3,), 0, 3), narrow),
        (PieceKey("wide", "weight", (5,), (0,), (5,), 0, 5), wide),
    ]
    path = save(tmp_path, 1, pieces, {}, MESH, SaveOptions(chunk_bytes=64))
    tensors = safetensors.torch.load_file(path / "pieces_00000.safetensors")
    assert torch.equal(tensors["narrow|weight|3|0:3|0:3"], narrow)
    assert torch.equal(tensors["wide|weight|5|0:5|0:5"], wide)
    assert dict(read_tensors(path))["narrow"].dtype == torch.bfloat16


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_saved_in_chunks(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    values = torch.randn(10_000, device="cuda")
    key = PieceKey("a", "master", (10_000,), (0,), (10_000,), 0, 10_000)
    path = save(tmp_path, 1, [(key, values)], {}, ParallelMesh.single("cuda"), SaveOptions(chunk_bytes=4096))
    target = torch.empty_like(values)
    load(path, [(key, target.copy_)], ParallelMesh.single("cuda"))
    assert torch.equal(target, values)


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 300 * 2**10, 2**24])
def test_digests_are_those_of_the_file_whatever_the_chunks(tmp_path: Path, chunk_bytes: int) -> None:
    """Buffers on both sides of the size from which threads hash them."""
    sizes = (3, 70_000, 200_000)
    pieces = [
        (PieceKey(f"t{size}", "weight", (size,), (0,), (size,), 0, size), torch.arange(size, dtype=torch.float32))
        for size in sizes
    ]
    file, stored = write_pieces(tmp_path / "pieces", take_snapshot(pieces), chunk_bytes, Storage())
    content = (tmp_path / "pieces").read_bytes()
    assert (file.name, file.size_bytes, file.sha256) == ("pieces", len(content), hashlib.sha256(content).hexdigest())
    assert file.chunks == tuple(
        hashlib.sha256(content[at : at + chunk_bytes]).hexdigest() for at in range(0, len(content), chunk_bytes)
    )
    for piece, (key, values) in zip(stored, pieces, strict=True):
        assert (piece.key, piece.dtype, piece.file) == (key, "F32", 0)
        assert content[piece.begin_bytes : piece.end_bytes] == values.numpy().tobytes()


def test_non_contiguous_views_are_written_correctly(tmp_path: Path) -> None:
    base = torch.arange(20, dtype=torch.int64)
    pieces = [
        (PieceKey(f"t{step}", "weight", (n,), (0,), (n,), 0, n), base[::step])
        for step in (2, 7, 20)
        for n in [len(base[::step])]
    ]
    write_pieces(tmp_path / "pieces", take_snapshot(pieces), 64, Storage())
    tensors = safetensors.torch.load_file(tmp_path / "pieces")
    assert sorted(tensor.tolist() for tensor in tensors.values()) == sorted(view.tolist() for _, view in pieces)


def test_a_file_that_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "pieces").write_text("mine")
    taken = take_snapshot([(PieceKey("a", "weight", (1,), (0,), (1,), 0, 1), torch.zeros(1))])
    with pytest.raises(StorageError, match=rf"cannot write {tmp_path}/pieces: File exists \(EEXIST\); the file needs"):
        write_pieces(tmp_path / "pieces", taken, 64, Storage())
    assert (tmp_path / "pieces").read_text() == "mine"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -(2.0**64)])
def test_a_value_that_no_run_can_continue_from_is_refused_by_its_tensor(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    key = PieceKey("layer.weight", "exp_avg", (100,), (0,), (100,), 0, 100)
    largest = min(torch.finfo(dtype).max, 1.8e19)  # its square is finite in float32, or in float16 not a concern
    values = torch.full((100,), largest, dtype=dtype)
    taken = take_snapshot([(key, values)])
    write_pieces(tmp_path / "good", taken, 64, Storage())
    values[77] = value
    shown = re.escape(str(float(values[77])))  # float16 rounds the largest to infinity
    with pytest.raises(NumericsError, match=rf"layer\.weight \(exp_avg\) has the value {shown} at element 77 of"):
        write_pieces(tmp_path / "pieces", taken, 64, Storage())
    write_pieces(tmp_path / "other", taken, 64, Storage(), check_finite=False)
