"""Saving and loading as one process: format, values, bytes read, memory, and which checkpoint is taken."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint import (
    DamagedError,
    Found,
    find,
    load,
    load_newest,
    newest_record,
    read_record,
    read_tensors,
    save,
    verify,
)
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import PieceKey
from tests.checkpoint.fake_pieces import Sink, cut_for_ranks, make_state, whole_sink

MESH = ParallelMesh.single()
RECORD = {"progress": {"step": 3, "consumed_samples": 24}, "config": {"lr": 0.1}}


class CountingStorage(Storage):
    """Counts what is read."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def read_into(self, handle: int, target: memoryview, offset_bytes: int) -> int:
        count = super().read_into(handle, target, offset_bytes)
        self.read_bytes += count
        return count


def save_state(directory: Path, step: int = 3, seed: int = 0, chunk_bytes: int = 256) -> Path:
    pieces = cut_for_ranks(make_state(seed=seed), 1, seed)[0]
    return save(directory, step, pieces, RECORD, MESH, chunk_bytes=chunk_bytes)


def test_a_folder_holds_safetensors_a_manifest_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_state(tmp_path / "new" / "run", 7)
    assert path == tmp_path / "new" / "run" / "iter_0000007"
    assert sorted(entry.name for entry in path.iterdir()) == ["manifest.json", "pieces_00000.safetensors"]
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "iter_0000007",
        "latest_checkpointed_iteration.txt",
    ]
    assert (path.parent / "latest_checkpointed_iteration.txt").read_bytes() == b"7"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format_version"] == 1
    assert manifest["step"] == 7
    assert manifest["record"] == RECORD == read_record(path)
    content = (path / "pieces_00000.safetensors").read_bytes()
    name, size, digest, chunks = manifest["files"][0]
    assert (name, size, digest) == ("pieces_00000.safetensors", len(content), hashlib.sha256(content).hexdigest())
    assert chunks == [hashlib.sha256(content[at : at + 256]).hexdigest() for at in range(0, size, 256)]
    output = capsys.readouterr().out
    assert f"saving checkpoint at iteration       7 to {path.parent}" in output
    assert f"successfully saved checkpoint at iteration       7 to {path.parent}" in output
    assert verify(path).step == 7


def test_the_safetensors_library_reads_the_pieces(tmp_path: Path) -> None:
    wide = torch.arange(5, dtype=torch.float32)
    narrow = torch.arange(3, dtype=torch.bfloat16)
    pieces = [
        (PieceKey("narrow", "weight", (3,), (0,), (3,), 0, 3), narrow),
        (PieceKey("wide", "weight", (5,), (0,), (5,), 0, 5), wide),
    ]
    path = save(tmp_path, 1, pieces, {}, MESH, chunk_bytes=64)
    tensors = safetensors.torch.load_file(path / "pieces_00000.safetensors")
    assert torch.equal(tensors["narrow|weight|3|0:3|0:3"], narrow)
    assert torch.equal(tensors["wide|weight|5|0:5|0:5"], wide)
    assert dict(read_tensors(path))["narrow"].dtype == torch.bfloat16


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
    path = save(directory, 1, cut_for_ranks(state, 1, seed)[0], {}, MESH, chunk_bytes=chunk_bytes)
    for reader_pieces in cut_for_ranks(state, 3, seed + 1):
        sink = Sink(reader_pieces)
        load(path, sink.wanted(), MESH)
        sink.check()
    tensors = dict(read_tensors(path, kind="weight"))
    assert all(torch.equal(tensors[name], state[name, "weight"]) for name in named)


def test_weight_and_master_stand_in_for_each_other_across_precisions(tmp_path: Path) -> None:
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


def big_state() -> tuple[torch.Tensor, list[tuple[PieceKey, torch.Tensor]]]:
    values = torch.arange(2 * 2**20, dtype=torch.float32)  # 8 MiB in 16 pieces
    shape = (2048, 1024)
    rows = 2048 // 16
    return values, [
        (
            PieceKey("big", "weight", shape, (part * rows, 0), ((part + 1) * rows, 1024), 0, rows * 1024),
            values[part * rows * 1024 : (part + 1) * rows * 1024],
        )
        for part in range(16)
    ]


def test_a_reader_reads_only_the_chunks_it_needs(tmp_path: Path) -> None:
    _, pieces = big_state()
    chunk_bytes = 64 * 2**10
    path = save(tmp_path, 1, pieces, {}, MESH, chunk_bytes=chunk_bytes)
    piece_bytes = pieces[0][0].numel * 4
    manifest_bytes = (path / "manifest.json").stat().st_size
    storage = CountingStorage()
    sink = Sink([pieces[5]])
    load(path, sink.wanted(), MESH, storage=storage)
    sink.check()
    # once to verify whole chunks (the piece's own and the two it shares), once to copy
    assert storage.read_bytes - manifest_bytes <= 2 * piece_bytes + 2 * chunk_bytes


def peak_bytes(work: Callable[[], object]) -> int:
    """How much more memory a forked child ever held while it did the work than when it began."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            work()
            os.write(sending, str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024).encode())
        finally:
            os._exit(0)
    os.close(sending)
    os.waitpid(child, 0)
    with os.fdopen(receiving) as answer:
        return int(answer.read())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts memory in KiB and forks safely")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_memory_stays_near_one_piece_and_one_chunk(tmp_path: Path) -> None:
    chunk_bytes, rows = 4 * 2**20, 10 * 2**10
    shape = (4 * rows, 1024)  # four pieces of 40 MiB
    values = torch.from_numpy(np.zeros((rows, 1024), dtype=np.float32))
    keys = [
        PieceKey("big", "weight", shape, (part * rows, 0), ((part + 1) * rows, 1024), 0, rows * 1024)
        for part in range(4)
    ]
    path = save(tmp_path, 1, [(key, values.reshape(-1)) for key in keys], {}, MESH, chunk_bytes=chunk_bytes)
    piece_bytes = rows * 1024 * 4

    def load_rows() -> None:
        load(path, [(key, lambda _: None) for key in keys], MESH)

    def load_column() -> None:
        column = PieceKey("big", "weight", shape, (0, 256), (4 * rows, 512), 0, rows * 1024)
        load(path, [(column, lambda _: None)], MESH)

    load(
        path, [(PieceKey("big", "weight", shape, (0, 0), (1, 8), 0, 8), lambda _: None)], MESH
    )  # imports what it needs
    slack = 12 * 2**20
    for work in (load_rows, load_column):
        assert piece_bytes / 2 < peak_bytes(work) <= piece_bytes + 2 * chunk_bytes + slack


def test_column_slices_are_read_with_one_chunk_in_memory(tmp_path: Path) -> None:
    values, pieces = big_state()
    path = save(tmp_path, 1, pieces, {}, MESH, chunk_bytes=64 * 2**10)
    column = PieceKey("big", "weight", (2048, 1024), (0, 256), (2048, 512), 0, 2048 * 256)
    sink = Sink([(column, values.reshape(2048, 1024)[:, 256:512].reshape(-1))])
    load(path, sink.wanted(), MESH)
    sink.check()


def test_a_save_streams_and_copies_no_tensor_whole(tmp_path: Path) -> None:
    class Stream:
        """Gives its tensors anew on every pass."""

        passes = 0

        def __iter__(self):
            Stream.passes += 1
            for number in range(64):
                yield (
                    PieceKey(f"t{number}", "weight", (2**16,), (0,), (2**16,), 0, 2**16),
                    torch.full((2**16,), float(number)),
                )

    path = save(tmp_path, 1, Stream(), {}, MESH)
    assert Stream.passes > 1
    assert dict(read_tensors(path, ["t63"]))["t63"].unique().tolist() == [63.0]


def test_nothing_there_is_none_and_something_like_a_checkpoint_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find(tmp_path / "absent") == []
    assert load_newest(tmp_path / "absent", list, MESH) is None
    assert load_newest(tmp_path, list, MESH) is None
    (tmp_path / ".tmp-iter_0000005-aa").mkdir()
    (tmp_path / ".run.lock").touch()
    (tmp_path / "config.json").touch()
    assert load_newest(tmp_path, list, MESH) is None
    assert "unfinished first save" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "global_step100",
        "mp_rank_00",
        "latest",
        "latest_checkpointed_iteration.txt",
        "layer_01-model_00-model_states.pt",
        "model.safetensors",
        "step-1200",
        "pytorch_model.bin",
        ".metadata",
        "release",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
)
def test_a_foreign_checkpoint_is_never_a_fresh_start(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"holds no checkpoint of this program, but .*{name}"):
        load_newest(tmp_path, list, MESH)


def test_a_megatron_folder_of_the_same_name_is_not_mistaken(tmp_path: Path) -> None:
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"none of the 1 (.|\n)*iter_0000100 has no manifest.json"):
        load_newest(tmp_path, list, MESH)


def test_an_unreadable_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot list .*file: Not a directory"):
        find(tmp_path / "file")


def test_the_newest_good_one_is_taken_whatever_the_hint_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 10_000_001):
        save_state(tmp_path, step, seed=step)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert [candidate.step for candidate in find(tmp_path)] == [10_000_001, 2, 1]
    sink = whole_sink(make_state(seed=10_000_001))
    found = load_newest(tmp_path, sink.wanted, MESH)
    assert found == Found(RECORD, tmp_path / "iter_10000001")
    sink.check()
    output = capsys.readouterr()
    assert "says '2'; ignoring it" in output.err
    assert f"successfully loaded checkpoint from {tmp_path} at iteration 10000001" in output.out


def test_a_damaged_one_is_skipped_and_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_state(tmp_path, 1, seed=1)
    path = save_state(tmp_path, 2, seed=2)
    content = bytearray((path / "pieces_00000.safetensors").read_bytes())
    content[-5] ^= 1
    (path / "pieces_00000.safetensors").write_bytes(content)
    sink = whole_sink(make_state(seed=1))
    assert load_newest(tmp_path, sink.wanted, MESH) == Found(RECORD, tmp_path / "iter_0000001")
    sink.check()
    text = capsys.readouterr().err
    assert f"skipping checkpoint {path}" in text
    assert "is damaged between bytes" in text
    assert "older than 1 damaged" in text
    with pytest.raises(DamagedError, match=r"pieces_00000.safetensors is damaged between bytes \d+ and \d+"):
        verify(path)
    assert newest_record(tmp_path, MESH) == Found(RECORD, path)  # sizes are right: only a load can tell


def test_all_damaged_is_an_error_that_names_each(tmp_path: Path) -> None:
    for step in (1, 2):
        (save_state(tmp_path, step) / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"none of the 2 (.|\n)*iter_0000002(.|\n)*iter_0000001"):
        load_newest(tmp_path, list, MESH)
    with pytest.raises(CheckpointError, match="none of the 2"):
        newest_record(tmp_path, MESH)


def test_a_checkpoint_that_does_not_fit_is_no_damage(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    save_state(tmp_path, 2)
    key = PieceKey("scale", "master", (5,), (0,), (5,), 0, 5)
    with pytest.raises(CheckpointError, match=r"tensor scale has shape \[\] in the checkpoint"):
        load_newest(tmp_path, lambda: [(key, lambda _: None)], MESH)


def test_a_folder_may_be_named_itself(tmp_path: Path) -> None:
    path = save_state(tmp_path, 4)
    save_state(tmp_path, 5)
    found = newest_record(path, MESH)
    assert found is not None
    assert found.path == path


def test_tensors_that_nobody_wants_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_state(tmp_path)
    load(path, [], MESH)
    assert "holds tensors that this run's model does not have: decoder.layers.0" in capsys.readouterr().err


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_state(tmp_path, 3, seed=1)
    path = save_state(tmp_path, 3, seed=2)
    sink = whole_sink(make_state(seed=2))
    load(path, sink.wanted(), MESH)
    sink.check()
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def test_a_folder_moved_aside_is_found_and_put_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_state(tmp_path, 3, seed=1)
    aside = path.rename(tmp_path / ".old-iter_0000003-0123456789abcdef")
    (tmp_path / ".tmp-iter_0000003-0123456789abcdef").mkdir()
    assert load_newest(tmp_path, whole_sink(make_state(seed=1)).wanted, MESH) == Found(RECORD, aside)
    save_state(tmp_path, 4)
    assert [candidate.path.name for candidate in find(tmp_path)] == ["iter_0000004", "iter_0000003"]
    assert "moving" in capsys.readouterr().err
    path.rename(aside)
    save_state(tmp_path, 3)
    assert not aside.exists()


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(3), r"has 4 elements, but the given tensor has shape \[3\]"),
        (torch.zeros(2, 2), r"has 4 elements, but the given tensor has shape \[2, 2\]"),
        (torch.zeros(4, dtype=torch.complex64), "element type torch.complex64"),
    ],
)
def test_a_tensor_that_does_not_fit_its_key_is_refused(tmp_path: Path, tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        save(tmp_path, 1, [(PieceKey("a", "weight", (4,), (0,), (4,), 0, 4), tensor)], {}, MESH)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("pieces", "record", "step", "text"),
    [
        ([((4,), (0,), (4,), 0, 3)], {}, 1, "elements 3:4 are in no piece"),
        ([((4,), (0,), (5,), 0, 5)], {}, 1, "cannot save a piece of tensor a .*does not lie in shape"),
        ([((4,), (0,), (4,), 0, 4)] * 2, {}, 1, "comes twice on one rank"),
        ([], {}, 1, "no rank has anything to save"),
        ([((4,), (0,), (4,), 0, 4)], {"x": float("nan")}, 1, "record .* is not JSON: Out of range"),
        ([((4,), (0,), (4,), 0, 4)], {"x": torch}, 1, "record .* is not JSON"),
        ([((4,), (0,), (4,), 0, 4)], {}, -1, "of step -1"),
    ],
)
def test_a_wrong_save_is_refused_and_leaves_nothing(
    tmp_path: Path, pieces: list[tuple], record: dict, step: int, text: str
) -> None:
    given_pieces = [(key := PieceKey("a", "weight", *piece), torch.zeros(key.numel)) for piece in pieces]
    with pytest.raises(CheckpointError, match=text):
        save(tmp_path, step, given_pieces, record, MESH)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("name", r"then b\|weight"),
        ("more", "nothing was announced"),
        ("less", "nothing came"),
        ("type", r"b\|weight\|.* was announced, then b\|weight"),
    ],
)
def test_pieces_that_change_between_passes_are_refused(tmp_path: Path, change: str, text: str) -> None:
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


def test_bytes_that_change_between_the_passes_of_a_load_are_found(tmp_path: Path) -> None:
    path = save_state(tmp_path)

    file = path / "pieces_00000.safetensors"

    def flip(_: torch.Tensor) -> None:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    wanted = [(key, flip) for key, _ in whole_sink(make_state()).wanted()]
    with pytest.raises(DamagedError, match=r"changed between bytes \d+ and \d+, where tensor .* while it was read"):
        load(path, wanted, MESH)


def test_a_right_that_is_missing_is_not_damage(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    save_state(tmp_path, 2)

    class Forbidden(Storage):
        def open_to_read(self, path: Path) -> tuple[int, int]:
            raise PermissionError(13, "Permission denied")

    with pytest.raises(StorageError, match=r"cannot read .*iter_0000002/manifest.json: Permission denied \(EACCES\)"):
        load_newest(tmp_path, list, MESH, storage=Forbidden())


def test_tools_read_named_tensors(tmp_path: Path) -> None:
    path = save_state(tmp_path)
    state = make_state()
    assert torch.equal(dict(read_tensors(path, ["scale"], "exp_avg"))["scale"], state["scale", "exp_avg"])
    with pytest.raises(CheckpointError, match="tensor nowhere is not in .*decoder.layers.0"):
        list(read_tensors(path, ["nowhere"]))
    assert len(read_manifest(path).files) == 1


def test_an_error_of_accept_is_not_swallowed(tmp_path: Path) -> None:
    path = save_state(tmp_path)

    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError("shape")

    accept: Callable[[torch.Tensor], None] = refuse
    with pytest.raises(RuntimeError, match="shape"):
        load(path, [(key, accept) for key, _ in whole_sink(make_state()).wanted()], MESH)


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_saved_in_chunks(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    values = torch.randn(10_000, device="cuda")
    key = PieceKey("a", "master", (10_000,), (0,), (10_000,), 0, 10_000)
    path = save(tmp_path, 1, [(key, values)], {}, ParallelMesh.single("cuda"), chunk_bytes=4096)
    target = torch.empty_like(values)
    load(path, [(key, target.copy_)], ParallelMesh.single("cuda"))
    assert torch.equal(target, values)
