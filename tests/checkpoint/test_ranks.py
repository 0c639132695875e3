"""Several ranks save, load, fail and fall back in agreement."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import CheckpointLock, SaveOptions, load, load_newest, newest_record, save, verify
from megatron.checkpoint.storage import Storage
from megatron.config import ParallelRequest
from megatron.errors import CheckpointError, LaunchError, MegatronError
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import PieceKey
from tests.checkpoint.made.fake_pieces import Sink, cut_for_ranks, make_state, whole_sink
from tests.helpers.ranks import run_ranks


def save_part(rank: int, directory: str, step: int, ranks: int, with_lock: bool = False) -> str:
    mesh = open_mesh(ParallelRequest())
    pieces = cut_for_ranks(make_state(seed=step), ranks, step)[rank]
    if not with_lock:
        return str(save(Path(directory), step, pieces, {"rank": rank}, mesh, SaveOptions(chunk_bytes=128)))
    with CheckpointLock(Path(directory), mesh) as lock:
        return str(save(Path(directory), step, pieces, {"rank": rank}, mesh, SaveOptions(chunk_bytes=128, lock=lock)))


def load_part(rank: int, directory: str, step: int, ranks: int) -> tuple[dict, str]:
    mesh = open_mesh(ParallelRequest())
    sink = Sink(cut_for_ranks(make_state(seed=step), ranks, 99)[rank])
    found = load_newest(Path(directory), sink.wanted, mesh)
    assert found is not None
    sink.check()
    assert newest_record(Path(directory), mesh) is not None
    return found.record, str(found.path)


def test_four_save_two_load_one_loads(tmp_path: Path) -> None:
    path = str(tmp_path / "iter_0000005")
    assert run_ranks(save_part, 4, str(tmp_path), 5, 4, True) == [path] * 4
    assert len(list(Path(path).glob("pieces_*.safetensors"))) == 4
    assert verify(Path(path)).record == {"rank": 0}
    assert run_ranks(load_part, 2, str(tmp_path), 5, 2) == [({"rank": 0}, path)] * 2
    sink = whole_sink(make_state(seed=5))
    assert load_newest(tmp_path, sink.wanted, ParallelMesh.single()) is not None
    sink.check()
    assert not (tmp_path / ".run.lock").exists()


class FullDisk(Storage):
    """Refuses every byte."""

    def write(self, handle: int, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def fail_on_one(rank: int, directory: str, how: str) -> tuple[str, str]:
    mesh = open_mesh(ParallelRequest())
    pieces = cut_for_ranks(make_state(), 3, 0)[rank]
    storage = FullDisk() if how == "disk" and rank == 2 else Storage()
    if how == "gap" and rank == 1:
        pieces = pieces[1:]
    if how == "type" and rank == 1:
        key, tensor = pieces[0]
        pieces[0] = (key, tensor.to(torch.complex64))
    try:
        save(Path(directory), 9, pieces, {}, mesh, SaveOptions(storage=storage))
    except MegatronError as failure:
        return type(failure).__name__, str(failure)
    return "", ""


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("disk", "StorageError", "No space left on device (ENOSPC); the file needs"),
        ("gap", "CheckpointError", "exactly once"),
        ("type", "CheckpointError", "element type torch.complex64"),
    ],
)
def test_the_failure_of_one_rank_is_raised_on_all_and_leaves_nothing(
    tmp_path: Path, how: str, kind: str, text: str
) -> None:
    run_ranks(save_part, 3, str(tmp_path), 5, 3)
    results = run_ranks(fail_on_one, 3, str(tmp_path), how)
    assert [name for name, _ in results] == [kind] * 3
    assert all(text in message for _, message in results)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["iter_0000005", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"


def two_checkpoints_one_damaged(rank: int, directory: str) -> tuple[str, list[int]]:
    """Rank r wants only tensor `t{r}`; the newer checkpoint's `t1` is damaged, so only rank 1 can see it."""
    mesh = open_mesh(ParallelRequest())
    key = PieceKey(f"t{rank}", "weight", (64,), (0,), (64,), 0, 64)
    for step in (1, 2):
        save(
            Path(directory), step, [(key, torch.full((64,), step + 10.0 * rank))], {}, mesh, SaveOptions(chunk_bytes=64)
        )
    if rank == 1:
        file = Path(directory) / "iter_0000002" / "pieces_00001.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 128
        file.write_bytes(content)
    values: list[torch.Tensor] = []
    found = load_newest(Path(directory), lambda: [(key, values.append)], mesh)
    assert found is not None
    return found.path.name, [int(tensor[0]) for tensor in values]


def test_damage_on_one_rank_makes_all_fall_back_before_any_tensor_changes(tmp_path: Path) -> None:
    results = run_ranks(two_checkpoints_one_damaged, 3, str(tmp_path))
    assert results == [("iter_0000001", [1]), ("iter_0000001", [11]), ("iter_0000001", [21])]


def wrong_on_one(rank: int, directory: str) -> str:
    mesh = open_mesh(ParallelRequest())
    keys = [PieceKey("nowhere", "weight", (4,), (0,), (4,), 0, 4)] if rank == 1 else []
    with pytest.raises(CheckpointError) as caught:
        load_newest(Path(directory), lambda: [(key, lambda _: None) for key in keys], mesh)
    with pytest.raises(LaunchError) as refused:
        CheckpointLock(Path(directory), mesh).acquire()
    return f"{caught.value} {refused.value}"


def test_unmet_requests_and_a_held_lock_raise_on_every_rank(tmp_path: Path) -> None:
    run_ranks(save_part, 1, str(tmp_path), 5, 1)
    with CheckpointLock(tmp_path, ParallelMesh.single()):
        results = run_ranks(wrong_on_one, 2, str(tmp_path))
    assert all("tensor nowhere is not in the checkpoint" in text and "is in use by run" in text for text in results)


def load_own(rank: int, directory: str) -> str:
    mesh = open_mesh(ParallelRequest())
    with pytest.raises(CheckpointError) as caught:
        load(Path(directory) / str(rank) / "iter_0000005", [], mesh)
    return str(caught.value)


def test_ranks_that_see_different_directories_are_rejected(tmp_path: Path) -> None:
    for rank in range(2):
        run_ranks(save_part, 1, str(tmp_path / str(rank)), 5, 1)
    assert all("ranks read different checkpoints" in text for text in run_ranks(load_own, 2, str(tmp_path)))
