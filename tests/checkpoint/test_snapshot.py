"""A snapshot: what it refuses, and that a copy does not follow the training tensors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import read_tensors, save, take_snapshot, write_snapshot
from megatron.checkpoint.snapshot import plan_copy
from megatron.errors import CheckpointError
from megatron.parallel.pieces import PieceKey
from tests.checkpoint.made.saved_state import MESH


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(3), r"expected a flat tensor of 4 elements, got shape \[3\]"),
        (torch.zeros(2, 2), r"expected a flat tensor of 4 elements, got shape \[2, 2\]"),
        (torch.zeros(4, dtype=torch.complex64), "element type torch.complex64"),
    ],
)
def test_a_tensor_that_does_not_match_its_key_is_rejected(tmp_path: Path, tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        save(tmp_path, 1, [(PieceKey("a", "weight", (4,), (0,), (4,), 0, 4), tensor)], {}, MESH)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("name", r"got b\|weight"),
        ("more", "expected nothing, got"),
        ("less", "got nothing"),
        ("type", r"expected b\|weight\|.*, got b\|weight"),
    ],
)
def test_pieces_that_change_between_passes_are_rejected(tmp_path: Path, change: str, text: str) -> None:
    class Changing:
        passes = 0

        def __iter__(self):
            Changing.passes += 1
            late = {"name": ["b", "a"], "more": ["a", "b", "c"], "less": ["a"], "type": ["a", "b"]}[change]
            for name in late if Changing.passes > 1 else ["a", "b"]:
                dtype = torch.float64 if Changing.passes > 1 and change == "type" and name == "b" else torch.float32
                yield PieceKey(name, "weight", (4,), (0,), (4,), 0, 4), torch.zeros(4, dtype=dtype)

    with pytest.raises(CheckpointError, match=f"pieces changed while they were saved: .*{text}"):
        save(tmp_path, 1, Changing(), {}, MESH)


def key_of(name: str, size: int) -> PieceKey:
    return PieceKey(name, "weight", (size,), (0,), (size,), 0, size)


def test_a_snapshot_copy_is_independent_of_the_runs_tensors(tmp_path: Path) -> None:
    """Training changes its tensors in place while the snapshot is written, here by another thread."""
    buffer = torch.empty(4 * 10_000 + 2 * 5, dtype=torch.uint8)
    base = torch.arange(2 * 10_000, dtype=torch.float32)
    weight, half = base[::2], torch.arange(5, dtype=torch.bfloat16)  # a view with gaps as well
    pieces = [(key_of("weight", 10_000), weight), (key_of("half", 5), half)]
    expected = {"weight": weight.clone(), "half": half.clone()}
    taken, copies = plan_copy(take_snapshot(iter([*pieces[::-1], (key_of("nothing", 0), torch.zeros(0))])), buffer)
    assert taken.size_bytes == buffer.numel()
    for target, source in copies:
        assert target.untyped_storage().data_ptr() == buffer.data_ptr()
        target.copy_(source)
    base.fill_(-1)
    half.zero_()
    with ThreadPoolExecutor(1) as threads:
        path = threads.submit(write_snapshot, tmp_path, 1, taken, {}, MESH).result()
    stored = dict(read_tensors(path))
    assert all(torch.equal(stored[name], values) for name, values in expected.items())
