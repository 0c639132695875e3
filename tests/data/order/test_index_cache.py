"""Index arrays on disk: built once, verified when loaded, never half written, safe when jobs start together."""

import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.data.order import index_cache
from megatron.data.order.index_cache import IndexCache
from megatron.errors import StorageError

DESCRIPTION = {"samples": 5, "seed": 1}


def make() -> dict[str, np.ndarray]:
    return {"first": np.arange(5, dtype=np.int32), "second": np.arange(6, dtype=np.int64).reshape(3, 2)}


def never() -> dict[str, np.ndarray]:
    raise AssertionError("the arrays are built although they exist")


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and np.array_equal(left[name], right[name]) for name in left
    )


def test_arrays_are_built_once_and_then_mapped(tmp_path):
    assert same(IndexCache(tmp_path / "cache").arrays("gpt", DESCRIPTION, make), make())
    for build in (True, False):
        assert same(IndexCache(tmp_path / "cache", build=build).arrays("gpt", DESCRIPTION, never), make())
    assert not [name for name in os.listdir(tmp_path / "cache") if name.endswith(".tmp")]


def test_another_description_is_another_file(tmp_path):
    cache = IndexCache(tmp_path)
    cache.arrays("gpt", DESCRIPTION, make)
    other = cache.arrays("gpt", {**DESCRIPTION, "seed": 2}, lambda: {"first": np.zeros(3, np.int32)})
    assert other["first"].tolist() == [0, 0, 0]
    assert same(cache.arrays("gpt", DESCRIPTION, never), make())


DAMAGE = (
    "cut array", "flipped bit", "missing array", "cut description", "other description", "no files", "missing entry",
    "deep nesting", "believable header", "believable floats", "believable pickle",
)  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_index_is_rebuilt(tmp_path, kind, capsys):
    cache = IndexCache(tmp_path)
    cache.arrays("gpt", DESCRIPTION, make)
    array = next(tmp_path.glob("*-first.npy"))
    description = next(tmp_path.glob("*.json"))
    stored = json.loads(description.read_text())
    if kind == "cut array":
        os.truncate(array, 100)
    elif kind == "flipped bit":
        data = bytearray(array.read_bytes())
        data[-1] ^= 1
        array.write_bytes(data)
    elif kind == "missing array":
        array.unlink()
    elif kind == "cut description":
        os.truncate(description, 20)
    elif kind == "other description":
        description.write_text(json.dumps({**stored, "description": {}}))
    elif kind == "no files":
        description.write_text(json.dumps({**stored, "files": {}}))
    elif kind == "missing entry":
        description.write_text(json.dumps({**stored, "files": {"second": stored["files"]["second"]}}))
    elif kind == "deep nesting":
        description.write_text("[" * 100_000)
    else:
        if kind == "believable header":
            array.write_bytes(array.read_bytes().replace(b"(5,)", b"(5,("))
        else:
            dtype = object if kind == "believable pickle" else np.float64
            np.save(array, np.array([1, 2], dtype=dtype), allow_pickle=True)
        stored["files"]["first"] = {"bytes": array.stat().st_size, "crc32": index_cache._crc32(array)}
        stored.pop("crc32")
        description.write_text(json.dumps({**stored, "crc32": index_cache._crc32_of(stored)}))
    assert same(cache.arrays("gpt", DESCRIPTION, make), make())
    assert "is rebuilt" in capsys.readouterr().err
    assert same(cache.arrays("gpt", DESCRIPTION, never), make())


def test_a_build_that_was_killed_leaves_nothing_that_is_taken_for_an_index(tmp_path):
    def killed() -> dict[str, np.ndarray]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        IndexCache(tmp_path).arrays("gpt", DESCRIPTION, killed)
    assert same(IndexCache(tmp_path).arrays("gpt", DESCRIPTION, make), make())


def build_slowly(folder: Path) -> None:
    def slow() -> dict[str, np.ndarray]:
        with (folder / "builds").open("a") as stream:
            stream.write("x")
        time.sleep(0.5)
        return make()

    assert same(IndexCache(folder / "cache").arrays("gpt", DESCRIPTION, slow), make())


def take_the_lock_and_die(folder: Path) -> None:
    def die() -> dict[str, np.ndarray]:
        os._exit(9)

    IndexCache(folder / "cache").arrays("gpt", DESCRIPTION, die)


def test_jobs_that_start_together_build_once_and_a_dead_owner_holds_no_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    dead = context.Process(target=take_the_lock_and_die, args=(tmp_path,))
    dead.start()
    dead.join(120)
    assert dead.exitcode == 9
    jobs = [context.Process(target=build_slowly, args=(tmp_path,)) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"


@pytest.mark.parametrize("reason", ["no locks", "no fcntl"])
def test_a_file_system_without_locks_only_costs_double_work(tmp_path, monkeypatch, reason):
    class NoLocks:
        LOCK_EX = LOCK_NB = 0

        @staticmethod
        def flock(stream: object, operation: int) -> None:
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr(index_cache, "fcntl", NoLocks if reason == "no locks" else None)
    assert same(IndexCache(tmp_path).arrays("gpt", DESCRIPTION, make), make())


def test_a_process_that_may_not_build_computes_in_memory_and_logs_it(tmp_path, capsys):
    assert same(IndexCache(tmp_path / "elsewhere", build=False).arrays("gpt", DESCRIPTION, make), make())
    assert "is this folder shared with the process that built it?" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert same(IndexCache(tmp_path / "file/cache").arrays("gpt", DESCRIPTION, make), make())
    assert "Not a directory. Use a writable folder. Set --data-cache-path" in capsys.readouterr().err
    with pytest.raises(StorageError, match="The index cache .*file/cache cannot be written"):
        IndexCache(tmp_path / "file/cache", required=True).arrays("gpt", DESCRIPTION, make)


def test_a_disk_that_fills_up_while_an_array_is_written(tmp_path, monkeypatch):
    def full(array: np.ndarray, facts: object, stream: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_cache, "_save_array", full)
    with pytest.raises(StorageError, match="No space left on device"):
        IndexCache(tmp_path, required=True).arrays("gpt", DESCRIPTION, make)
    assert os.listdir(tmp_path) == [".lock"]
