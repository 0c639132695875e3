"""Tools read tensors and records from one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint import DamagedError, read_record, read_tensors, verify
from megatron.checkpoint.manifest import read_manifest
from megatron.errors import CheckpointError
from tests.checkpoint.fake_pieces import make_state
from tests.checkpoint.saved_state import RECORD, save_state


def test_tools_read_named_tensors(tmp_path: Path) -> None:
    path = save_state(tmp_path)
    state = make_state()
    assert torch.equal(dict(read_tensors(path, ["scale"], "exp_avg"))["scale"], state["scale", "exp_avg"])
    with pytest.raises(CheckpointError, match="tensor nowhere is not in .*decoder.layers.0"):
        list(read_tensors(path, ["nowhere"]))
    assert len(read_manifest(path).files) == 1


def test_a_tensor_can_be_read_with_merged_or_split_dimensions(tmp_path: Path) -> None:
    path = save_state(tmp_path)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    expected = make_state()[name, "master"]
    for shape in [(2, 3, 20), (6, 2, 10), (120,), (6, 20)]:
        ((_, tensor),) = read_tensors(path, [name], shapes={name: shape})
        assert torch.equal(tensor, expected.reshape(shape))
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[6, 20\] in the checkpoint.* needs \[20, 6\]"):
        list(read_tensors(path, [name], shapes={name: (20, 6)}))


def test_a_record_is_read_without_opening_tensor_files(tmp_path: Path) -> None:
    path = save_state(tmp_path)
    for file in path.glob("pieces_*"):
        file.unlink()
    assert read_record(path) == RECORD
    with pytest.raises(DamagedError, match=r"cannot read .*pieces_00000.safetensors"):
        verify(path)
