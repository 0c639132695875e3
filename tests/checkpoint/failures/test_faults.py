"""A save that fails or is killed at any point leaves every earlier checkpoint intact and reports the cause."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from megatron.checkpoint import SaveOptions, load_newest, save
from megatron.checkpoint.storage import Storage
from megatron.errors import StorageError
from megatron.parallel.mesh import ParallelMesh
from tests.checkpoint.made.fake_pieces import cut_for_ranks, make_state, whole_sink
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import DEFAULT_CASES

MESH = ParallelMesh.single()
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class FaultyStorage(Storage):
    """Counts its changing operations and fails at one of them."""

    def __init__(
        self,
        fail_at: int | None = None,
        number: int = errno.ENOSPC,
        short: bool = False,
        kill: bool = False,
        only: str | None = None,
    ) -> None:
        self.operations: list[str] = []
        self._fail_at = fail_at
        self._number = number
        self._short = short
        self._kill = kill
        self._only = only

    def _step(self, name: str, path: Path | None = None) -> None:
        if self._only is not None and name != self._only:
            return
        self.operations.append(name)
        if self._fail_at is not None and len(self.operations) == self._fail_at + 1:
            if self._kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self._number, os.strerror(self._number), str(path))

    def make_directory(self, path: Path) -> None:
        self._step("mkdir", path)
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._step("create", path)
        return super().create(path)

    def write(self, handle: int, content: memoryview) -> int:
        if self._short:
            content = content[: max(1, len(content) // 2)]
        self._step("write")
        return super().write(handle, content)

    def sync(self, handle: int) -> None:
        self._step("sync")

    def sync_directory(self, path: Path) -> None:
        self._step("sync directory", path)

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename", target)
        super().rename(source, target)

    def remove_tree(self, path: Path) -> None:
        self._step("remove", path)
        super().remove_tree(path)


def save_seed(directory: Path, step: int, seed: int, storage: Storage | None = None) -> None:
    pieces = cut_for_ranks(make_state(seed=seed), 1, seed)[0]
    save(
        directory, step, pieces, {"seed": seed}, MESH, SaveOptions(chunk_bytes=512, storage=storage or FaultyStorage())
    )


def loaded_seed(directory: Path) -> int:
    """Loads what recovery takes and checks every value against the seed in its record."""
    sink = whole_sink(make_state(seed=0))
    found = load_newest(directory, sink.wanted, MESH)
    assert found is not None
    sink.expected = whole_sink(make_state(seed=found.record["seed"])).expected
    sink.check()
    return int(found.record["seed"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_failure_at_any_operation_keeps_the_earlier_checkpoint(tmp_path: Path, number: int) -> None:
    save_seed(tmp_path, 1, 1)
    counted = FaultyStorage()
    save_seed(tmp_path / "other", 2, 2, counted)
    assert {"mkdir", "create", "write", "sync", "sync directory", "rename"} <= set(counted.operations)
    for place, operation in enumerate(counted.operations):
        try:
            save_seed(tmp_path, 2, 2, FaultyStorage(place, number=number))
        except StorageError as failure:
            text = str(failure)
            assert str(tmp_path) in text
            assert errno.errorcode[number] in text
            assert "free space: " in text
            assert "needs" in text
        names = sorted(entry.name for entry in tmp_path.iterdir() if entry.name != "other")
        hint = (tmp_path / "latest_checkpointed_iteration.txt").read_text()
        if "iter_0000002" in names:  # only what comes after the rename may fail now
            assert operation in ("sync directory", "create", "write", "sync", "rename", "remove"), operation
            assert loaded_seed(tmp_path) == 2
            assert hint in ("1", "2")
            for file in (tmp_path / "iter_0000002").iterdir():
                file.unlink()
            (tmp_path / "iter_0000002").rmdir()
            (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
        else:
            assert hint == "1"
            assert loaded_seed(tmp_path) == 1
        assert not [name for name in names if name.startswith(".")], (operation, names)


def test_short_writes_are_finished(tmp_path: Path) -> None:
    save_seed(tmp_path, 1, 1, FaultyStorage(short=True))
    assert loaded_seed(tmp_path) == 1


def test_a_write_of_zero_bytes_is_a_failure(tmp_path: Path) -> None:
    class Stuck(FaultyStorage):
        def write(self, handle: int, content: memoryview) -> int:
            return 0

    with pytest.raises(StorageError, match="accepts no more bytes"):
        save_seed(tmp_path, 1, 1, Stuck())


def test_insufficient_disk_space_is_reported_before_writing(tmp_path: Path) -> None:
    class Small(FaultyStorage):
        def free_bytes(self, path: Path) -> int | None:
            return 1000

    storage = Small()
    with pytest.raises(StorageError, match=r"not enough space for a checkpoint in .*: it needs \d+ bytes, 1000 bytes"):
        save_seed(tmp_path, 1, 1, storage)
    assert "write" not in storage.operations


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOENT, r"The --save directory must be shared by all nodes"),
        (errno.EROFS, r"Read-only file system \(EROFS\).* Make it writable for this user, or use another --save dir"),
        (errno.ENOSPC, r"\(ENOSPC\).* Free some space or use another --save directory"),
    ],
)
def test_what_refuses_a_file_is_told_with_the_way_out(tmp_path: Path, number: int, advice: str) -> None:
    storage = FaultyStorage(0, number=number, only="create")
    with pytest.raises(StorageError, match=advice):
        save_seed(tmp_path, 1, 1, storage)


def test_an_existing_file_at_the_path_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(StorageError, match=r"cannot write .*taken.*EEXIST|ENOTDIR"):
        save_seed(tmp_path / "taken", 1, 1, Storage())


def silence() -> None:
    """Sends what this process prints to nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)


def in_child(work: object) -> int:
    """Runs `work()` in a forked child and returns how it ended (minus the signal's number if killed)."""
    child = os.fork()
    if child == 0:
        try:
            silence()
            work()  # type: ignore[operator]
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step"])
def test_a_kill_at_any_operation_keeps_a_valid_checkpoint(
    tmp_path: Path, again: bool, pytestconfig: pytest.Config
) -> None:
    """Every third operation and the last, or all with more --cases."""
    stride = 3 if pytestconfig.getoption("--cases") <= DEFAULT_CASES else 1
    # In another process: a fork of the one that runs the tests takes longer than a save.
    run_ranks(kill_at_operations, 1, tmp_path, again, stride)


def kill_at_operations(rank: int, folder: Path, again: bool, stride: int) -> None:
    """Saves, killed at one operation after another, and loads."""
    step = 1 if again else 2
    save_seed(folder / "start", 1, 1)
    save_seed(folder / "count", 1, 1)
    counted = FaultyStorage()
    save_seed(folder / "count", step, 2, counted)
    seeds = []
    last = len(counted.operations) - 1
    for place in sorted({*range(0, last, stride), last}):
        directory = folder / f"kill{place}"
        shutil.copytree(folder / "start", directory)

        def die(directory: Path = directory, place: int = place) -> None:
            save_seed(directory, step, 2, FaultyStorage(place, kill=True))

        assert in_child(die) == -signal.SIGKILL
        seeds.append(loaded_seed(directory))
        save_seed(directory, 3, 3)  # the next save cleans up
        assert not [entry.name for entry in directory.iterdir() if entry.name.startswith(".")]
        assert loaded_seed(directory) == 3
        expected = (
            ["iter_0000001", "iter_0000003"]
            if again or seeds[-1] == 1
            else ["iter_0000001", "iter_0000002", "iter_0000003"]
        )
        assert sorted(entry.name for entry in directory.glob("iter_*")) == expected
    assert seeds == sorted(seeds)  # once the new one counts, it counts for good
    assert set(seeds) == {1, 2}
