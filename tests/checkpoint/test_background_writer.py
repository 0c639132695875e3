"""Saves in the background: what they hold, that one waits for the other, and how their failures are reported."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron import device
from megatron.checkpoint import CheckpointLock, SaveOptions, background_writer, read_tensors, save
from megatron.checkpoint.background_writer import BackgroundWriter, memory_problem
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError, NumericsError, PeerLostError, StorageError
from megatron.parallel.joining import open_mesh
from megatron.parallel.pieces import PieceKey
from tests.checkpoint.made.saved_state import MESH
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks

PATIENCE_SECONDS = 120


def key_of(name: str, size: int) -> PieceKey:
    return PieceKey(name, "weight", (size,), (0,), (size,), 0, size)


class SlowDisk(Storage):
    """Writes only while its gate is open, and then fails if told to."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.arrived = threading.Event()
        self.failure: Exception | None = None

    def write(self, handle: int, content: memoryview) -> int:
        self.arrived.set()
        assert self.gate.wait(PATIENCE_SECONDS)
        if self.failure is not None:
            raise self.failure
        return super().write(handle, content)


@pytest.fixture
def disk() -> Iterator[SlowDisk]:
    made = SlowDisk()
    yield made
    made.gate.set()


def begin(writer: BackgroundWriter, step: int, tensor: torch.Tensor) -> None:
    writer.start_save(step, [(key_of("a", tensor.numel()), tensor)], {"step": step})


def outcome_of(writer: BackgroundWriter) -> Any:
    writer.wait()
    return writer.take_outcome()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, disk: SlowDisk) -> None:
    tensor = torch.arange(1000.0)
    with BackgroundWriter(tmp_path / "there", MESH, SaveOptions(storage=disk)) as writer:
        begin(writer, 3, tensor)
        writer.wait_for_copy()
        tensor.zero_()
        assert disk.arrived.wait(PATIENCE_SECONDS)
        assert writer.take_outcome() is None
        with pytest.raises(RuntimeError, match="a save is in progress; wait for it"):
            begin(writer, 4, tensor)
        assert not (tmp_path / "there" / "iter_0000003").exists()
        disk.gate.set()
        outcome = outcome_of(writer)
        assert (outcome.step, outcome.failure) == (3, None) and outcome.seconds > 0
        assert writer.take_outcome() is None  # heard once
    assert dict(read_tensors(tmp_path / "there" / "iter_0000003"))["a"].tolist() == list(range(1000))


def test_the_files_are_those_of_a_save_at_once(tmp_path: Path) -> None:
    pieces = [(key_of("half", 5), torch.arange(5.0).bfloat16()), (key_of("wide", 7), torch.arange(14.0)[::2])]
    save(tmp_path / "once", 1, pieces, {}, MESH)
    with BackgroundWriter(tmp_path / "beside", MESH) as writer:
        for step in (1, 2):  # the buffer is used again
            writer.start_save(step, iter(pieces), {})
            writer.wait()
    expected = (tmp_path / "once" / "iter_0000001" / "pieces_00000.safetensors").read_bytes()
    for step in (1, 2):
        assert (tmp_path / "beside" / f"iter_000000{step}" / "pieces_00000.safetensors").read_bytes() == expected


def test_a_failure_is_reported_and_the_next_save_succeeds(tmp_path: Path, disk: SlowDisk) -> None:
    disk.gate.set()
    with BackgroundWriter(tmp_path, MESH, SaveOptions(storage=disk)) as writer:
        disk.failure = OSError(errno.ENOSPC, "No space left on device")
        begin(writer, 1, torch.ones(3))
        assert isinstance(outcome_of(writer).failure, StorageError)
        disk.failure = None
        begin(writer, 2, torch.full((3,), float("inf")))
        assert isinstance(outcome_of(writer).failure, NumericsError)
        disk.failure = ValueError("a mistake of ours")
        begin(writer, 3, torch.ones(3))
        assert isinstance(outcome_of(writer).failure, ValueError)
        disk.failure = None
        begin(writer, 4, torch.ones(3))
        assert outcome_of(writer).failure is None
    assert sorted(entry.name for entry in tmp_path.glob("*")) == ["iter_0000004", "latest_checkpointed_iteration.txt"]
    assert not list(tmp_path.glob(".*"))


def test_leaving_waits_for_the_save_and_warns_of_its_failure(
    tmp_path: Path, disk: SlowDisk, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError), BackgroundWriter(tmp_path, MESH, SaveOptions(storage=disk)) as writer:
        begin(writer, 1, torch.ones(3))
        threading.Timer(0.2, disk.gate.set).start()
        raise KeyError("the run failed for its own reasons")
    assert (tmp_path / "iter_0000001").is_dir()
    disk.failure = OSError(errno.EIO, "Input/output error")
    with BackgroundWriter(tmp_path, MESH, SaveOptions(storage=disk)) as writer:
        begin(writer, 2, torch.ones(3))
    assert "warning: the checkpoint of iteration 2 was not saved: cannot write" in capfd.readouterr().err


class CountingDisk(Storage):
    """Takes a while for each part, and counts them."""

    def __init__(self, seconds: float) -> None:
        self.parts, self.seconds, self.has_begun = 0, seconds, threading.Event()

    def write(self, handle: int, content: memoryview) -> int:
        self.parts += 1
        self.has_begun.set()
        time.sleep(self.seconds)
        return super().write(handle, content)


def many_pieces(count: int) -> list[tuple[PieceKey, torch.Tensor]]:
    return [(key_of(f"t{number}", 3), torch.ones(3)) for number in range(count)]


@pytest.mark.parametrize("reason", [PeerLostError("gone"), KeyboardInterrupt(), RuntimeError("Broken pipe")], ids=repr)
def test_a_run_that_lost_a_rank_or_is_interrupted_gives_up_its_save(tmp_path: Path, reason: BaseException) -> None:
    disk = CountingDisk(0.1)
    with pytest.raises(type(reason)), BackgroundWriter(tmp_path, MESH, SaveOptions(storage=disk)) as writer:
        writer.start_save(1, many_pieces(200), {})
        assert disk.has_begun.wait(PATIENCE_SECONDS)
        raise reason
    assert disk.parts < 100
    assert not list(tmp_path.glob("*")) and not list(tmp_path.glob(".*"))


def test_the_thread_takes_the_gpu_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread begins on the first GPU, where page-locking memory or a stream would make a context."""
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(device, "use_on_this_thread", lambda gpu: chosen.append((threading.current_thread().name, gpu)))
    with BackgroundWriter(tmp_path, MESH):
        pass
    assert chosen == [("checkpoint-writer", MESH.device)]


def test_a_dead_thread_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    def leave(path: Path, mesh: Any) -> None:
        raise SystemExit

    writer = BackgroundWriter(tmp_path, MESH, SaveOptions(after_commit=leave)).__enter__()
    begin(writer, 1, torch.ones(3))
    for ask in (writer.wait, writer.take_outcome):
        with pytest.raises(CheckpointError, match="the checkpoint writer thread has terminated.*--no-async-save"):
            ask()
    writer.wait_for_copy()  # training is not held up by it


def test_what_follows_a_commit_may_fail(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[Path] = []

    def copy(path: Path, mesh: Any) -> None:
        seen.append(path)
        raise StorageError("the second folder is full")

    with BackgroundWriter(tmp_path, MESH, SaveOptions(after_commit=copy)) as writer:
        begin(writer, 1, torch.ones(3))
        assert outcome_of(writer).failure is None
    assert seen == [tmp_path / "iter_0000001"] and seen[0].is_dir()
    assert "iter_0000001 is saved, but a post-save action failed: the second folder is full" in capfd.readouterr().err


class Refusing(Storage):
    """Refuses every byte while it is told to."""

    refuses = False

    def write(self, handle: int, content: memoryview) -> int:
        if self.refuses:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(handle, content)


def several_ranks(rank: int, directory: str) -> list[str]:
    """A save that fails on one rank, one of values that are not finite on one, and one that succeeds; in each, the main
    threads use their own groups meanwhile."""
    mesh, disk = open_mesh(Layout()), Refusing()
    notes: list[str] = []

    def after(path: Path, seen: Any) -> None:
        notes.append(f"{path.name} over {seen.control.name}")

    with (
        CheckpointLock(Path(directory), mesh) as lock,
        BackgroundWriter(Path(directory), mesh, SaveOptions(lock=lock, after_commit=after, storage=disk)) as writer,
    ):
        for step in (1, 2, 3):
            disk.refuses = step == 1 and rank == 1
            values = torch.full((4000,), float("nan") if step == 2 and rank == 2 else float(rank))
            key = PieceKey("a", "weight", (3, 4000), (rank, 0), (rank + 1, 4000), 0, 4000)
            writer.start_save(step, [(key, values)], {"rank": rank})
            for _ in range(50):
                total = torch.ones(10)
                torch.distributed.all_reduce(total, group=mesh.world.group)
                assert total.tolist() == [3.0] * 10
            failure = outcome_of(writer).failure
            notes.append(f"{type(failure).__name__}: {failure}"[:60] if failure else "saved")
    return notes


def test_all_ranks_get_the_same_outcome(tmp_path: Path) -> None:
    results = run_ranks(several_ranks, 3, str(tmp_path))
    for rank, (first, second, *rest) in enumerate(results):
        assert first.startswith("StorageError: " + ("" if rank == 1 else "rank 1: ") + "cannot write ")
        assert second.startswith(
            "NumericsError: " + ("" if rank == 2 else "rank 2: ") + "tensor a (weight) has the value nan"
        )
        assert rest == ["iter_0000003 over background", "saved"]
    stored = dict(read_tensors(tmp_path / "iter_0000003"))["a"]
    assert stored.reshape(3, 4000)[:, 0].tolist() == [0.0, 1.0, 2.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def judge(rank: int) -> list[str | None]:
    """Two machines of two ranks each."""
    mesh = open_mesh(Layout())
    background_writer.socket.gethostname = lambda: f"node{rank // 2}"  # type: ignore[assignment]
    return [
        memory_problem(100, mesh, 200),
        memory_problem(100, mesh, 199 if rank == 3 else 1000),
        memory_problem(10**15, mesh, None),
    ]


def test_the_ranks_of_a_machine_share_its_memory() -> None:
    facts = "takes 200 bytes of host memory, but only 199 bytes are available"
    sentence = f"a copy of the state of the 2 rank(s) on node1 {facts}"
    assert run_ranks(judge, 4) == [[None, sentence, None]] * 4


def test_the_pieces_are_listed_before_training_goes_on(tmp_path: Path) -> None:
    """DeepSpeed rearranges the optimizer's groups, which the listing reads, before it calls the optimizer."""
    listed: list[threading.Thread] = []

    def pieces() -> Iterator[tuple[PieceKey, torch.Tensor]]:
        listed.append(threading.current_thread())
        yield key_of("a", 3), torch.ones(3)

    with BackgroundWriter(tmp_path, MESH) as writer:
        writer.start_save(1, pieces(), {})
        assert listed == [threading.main_thread()]
        assert outcome_of(writer).failure is None


def test_who_waits_shows_that_the_save_advances(tmp_path: Path) -> None:
    beats: list[threading.Thread] = []
    with BackgroundWriter(tmp_path, MESH, SaveOptions(storage=CountingDisk(0.1))) as writer:
        writer.beat = lambda: beats.append(threading.current_thread())
        writer.start_save(1, many_pieces(13), {})
        time.sleep(0.1)
        assert not beats
        writer.wait()
    assert beats and set(beats) == {threading.main_thread()}
