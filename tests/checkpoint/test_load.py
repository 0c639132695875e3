"""Any layout reads any layout, in any precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint import DamagedError, SaveOptions, load, read_record, read_tensors, save, verify
from megatron.checkpoint.manifest import read_manifest
from megatron.errors import CheckpointError
from tests.checkpoint.made.fake_pieces import Sink, cut_for_ranks, make_state
from tests.checkpoint.made.saved_state import MESH, RECORD, save_state


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=3),
    st.integers(0, 2**32),
    st.sampled_from([64, 100, 4096]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_layout_reads_any_layout(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], seed: int, chunk_bytes: int, dtype: torch.dtype
) -> None:
    named = {f"layer.{number}": tuple(shape) for number, shape in enumerate(shapes)}
    state = make_state(named, ("weight", "exp_avg"), seed % 1000, dtype)
    directory = tmp_path_factory.mktemp("reshape")
    path = save(directory, 1, cut_for_ranks(state, 1, seed)[0], {}, MESH, SaveOptions(chunk_bytes=chunk_bytes))
    for reader_pieces in cut_for_ranks(state, 3, seed + 1):
        sink = Sink(reader_pieces)
        load(path, sink.wanted(), MESH)
        sink.check()
    tensors = dict(read_tensors(path, kind="weight"))
    assert all(torch.equal(tensors[name], state[name, "weight"]) for name in named)


def test_unrequested_tensors_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_state(tmp_path)
    load(path, [], MESH)
    assert "has tensors that this run's model does not have: decoder.layers.0" in capsys.readouterr().err


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


def test_weight_and_master_weight_are_interchangeable_across_precisions(tmp_path: Path) -> None:
    shapes = {"a": (4, 3)}
    half = make_state(shapes, ("master",))
    path = save(tmp_path / "half", 1, cut_for_ranks(half, 1, 0)[0], {}, MESH)
    sink = Sink(cut_for_ranks(half, 1, 1, {"master": "weight"})[0])
    load(path, sink.wanted(), MESH)
    sink.check()
    full = make_state(shapes, ("weight",), dtype=torch.bfloat16)
    path = save(tmp_path / "full", 1, cut_for_ranks(full, 1, 0)[0], {}, MESH)
    sink = Sink(cut_for_ranks(full, 1, 1, {"weight": "master"})[0])
    load(path, sink.wanted(), MESH)
    sink.check()
    assert all(values.dtype == torch.float32 for values in sink.got.values())
