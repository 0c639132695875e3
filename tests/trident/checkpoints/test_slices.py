"""Tensors of a checkpoint are read in slices that make them up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.recovery import OpenCheckpoint
from megatron.errors import CheckpointError, DamagedError
from tests.checkpoint.made.fake_pieces import make_state
from tests.checkpoint.made.stored import save_checkpoint
from trident.checkpoints import slices
from trident.checkpoints.slices import batches


def test_slices_make_up_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 28)
    state = make_state()
    checkpoint = save_checkpoint(tmp_path, state)
    tensors = checkpoint.tensors()
    assert {(name, kind) for name, tensor in tensors.items() for kind in tensor.kinds} == set(state)
    for (name, kind), expected in state.items():
        assert tensors[name].shape == tuple(expected.shape)
        assert tensors[name].weight_kind == "master"
        keys = [key for batch in batches([(name, kind, tensors[name].shape)]) for key in batch]
        assert all(key.numel <= 7 for key in keys)
        assert torch.equal(torch.cat(checkpoint.read(keys)), expected.flatten())


@pytest.mark.parametrize(
    ("size", "expected"),
    [(12, [[3], [2], [3], [2]]), (20, [[5], [5]]), (40, [[5, 5]]), (28, [[5], [5]]), (1, 10 * [[1]])],
)
def test_small_slices_share_a_batch(size: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", size)
    read = batches((name, "weight", (5,)) for name in "ab")
    assert [[key.numel for key in batch] for batch in read] == expected


def test_the_newest_checkpoint_is_opened(tmp_path: Path) -> None:
    for step in (4, 12):
        save_checkpoint(tmp_path, make_state(), step)
    assert OpenCheckpoint.newest(tmp_path).manifest.step == 12
    assert OpenCheckpoint.newest(tmp_path / "iter_0000004").record.progress.step == 4
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*nowhere"):
        OpenCheckpoint.newest(tmp_path / "nowhere")


def test_damaged_bytes_are_an_error(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, make_state())
    file = next(checkpoint.folder.glob("pieces_*"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedError, match=r"pieces_00000.safetensors is damaged between bytes"):
        for tensor in checkpoint.tensors().values():
            for batch in batches((tensor.name, kind, tensor.shape) for kind in tensor.kinds):
                checkpoint.read(batch)
