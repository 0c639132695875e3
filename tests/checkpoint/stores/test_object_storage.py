"""Checkpoints in object stores, one of them a local S3 server: copied, loaded, and what a copy that dies leaves."""

from __future__ import annotations

import errno
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.checkpoint import newest_record
from megatron.checkpoint.object_storage import ObjectStorage
from megatron.checkpoint.publish import remove_checkpoint
from megatron.checkpoint.recovery import find
from megatron.checkpoint.retention import copying
from megatron.checkpoint.retention.copying import copy_checkpoint
from megatron.checkpoint.storage import DISK, read_head, write_file
from megatron.config.flags.paths import is_address
from megatron.errors import CheckpointError, ConfigError, StorageError
from tests.checkpoint.retention.checkpoints import MESH, loaded_seed, save_step
from tests.helpers.tiny_run import train, write_tiny_corpus

fsspec = pytest.importorskip("fsspec")
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The address of a bucket on a server of this process."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("models")
        yield "s3://models"
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def place(request: pytest.FixtureRequest) -> Path:
    """An empty folder of a store."""
    root = request.getfixturevalue("bucket") if request.param == "s3" else "memory://models"
    return Path(f"{root}/run{next(NUMBERS)}")


def copied(source: Path, place: Path, *, replaces: bool = False) -> Path | None:
    return copy_checkpoint(source, place, MESH, flag="--save-secondary", replaces=replaces)


def test_a_checkpoint_is_copied_to_a_store_and_loaded_from_it(place: Path, tmp_path: Path) -> None:
    assert is_address(place) and find(place) == []
    for step in (3, 4):
        made = copied(save_step(tmp_path / "source", step, seed=step), place)
        assert made == place / f"iter_{step:07d}"
    assert copied(tmp_path / "source" / "iter_0000004", place) is None, "it is there"
    assert [candidate.step for candidate in find(place)] == [4, 3]
    assert loaded_seed(place) == 4
    newest = newest_record(tmp_path / "nothing", MESH, also=(place,))
    assert newest is not None and newest.path == place / "iter_0000004"
    assert DISK.names(place) == ["iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt"]
    other = save_step(tmp_path / "other", 4, seed=9)
    assert copied(other, place, replaces=True) == place / "iter_0000004" and loaded_seed(place) == 9


def test_nothing_is_copied_within_a_store_and_a_replacement_that_fails_is_taken_back(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fsspec.filesystem(str(place).partition(":")[0])
    owner = store if "cp_file" in vars(store) else type(store)  # undoing would leave the name of a class on its object
    copies, real = [], owner.cp_file

    def counted(*words: object, **named: object) -> object:
        copies.append(words)
        return real(*words, **named)

    monkeypatch.setattr(owner, "cp_file", counted)
    for step in (3, 4):
        copied(save_step(tmp_path / "source", step), place)
    remove_checkpoint(place / "iter_0000003", DISK)
    assert copies == [] and DISK.names(place) == ["iter_0000004", "latest_checkpointed_iteration.txt"]

    def failing(directory: Path, *_: object) -> None:
        raise OSError("the connection is gone")

    with monkeypatch.context() as patch:
        patch.setattr(copying, "read_index", failing)
        patch.setattr(copying.CopyInProgress, "_manifest_text", failing)
        with pytest.raises(StorageError, match="cannot write .*manifest.json: the connection is gone"):
            copied(save_step(tmp_path / "other", 4, seed=9), place, replaces=True)
    assert DISK.names(place) == ["iter_0000004", "latest_checkpointed_iteration.txt"]
    assert loaded_seed(place) == 4, "it is back in its place"
    copied(tmp_path / "other" / "iter_0000004", place / "more")
    with pytest.raises(FileExistsError):
        DISK.rename(place / "more" / "iter_0000004", place / "iter_0000004")


def test_a_store_that_refuses_is_never_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    store = type(fsspec.filesystem("memory"))

    def refused(*_: object, **named: object) -> None:
        raise PermissionError(errno.EACCES, "refused")

    for name in ("ls", "info"):
        monkeypatch.setattr(store, name, refused)
    folder, other = Path("memory://models/refused/iter_0000001"), Path("memory://models/refused/iter_0000002")
    for work in (DISK.remove_tree, DISK.remove_file, lambda path: DISK.rename(path, other), find):
        with pytest.raises((PermissionError, StorageError), match="refused"):
            work(folder)


def test_a_folder_of_another_program_is_not_taken_for_a_dead_copy(tmp_path: Path) -> None:
    place = Path(f"memory://models/run{next(NUMBERS)}")
    write_file(DISK, place / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt", b"1")
    copied(save_step(tmp_path / "source", 3), place)
    assert DISK.exists(place / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="iter_0000004 is a different checkpoint of step 4"):
        copied(save_step(tmp_path / "source", 4), place)


def test_objects(place: Path) -> None:
    path = place / "a" / "b.txt"
    write_file(DISK, path, b"0123456789")
    assert read_head(DISK, path, 4) == b"0123" and DISK.names(place) == ["a"]
    with pytest.raises(FileExistsError):
        DISK.create(path)
    with pytest.raises(OSError, match="it is a folder"):
        DISK.open_to_read(place / "a")
    with pytest.raises(FileNotFoundError):
        DISK.open_to_read(place / "c")
    DISK.remove_file(path)
    DISK.remove_file(path)
    DISK.remove_tree(place)
    assert not DISK.exists(path) and DISK.free_bytes(place) is None and not DISK.is_link(path)


def test_an_unknown_store_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=re.escape("nostore://bucket/run requires fsspec with support for nostore://")
    ):
        ObjectStorage().names(Path("nostore://bucket/run"))


def test_a_run_copies_to_a_store_and_is_evaluated_from_there(bucket: str, tmp_path: Path) -> None:
    corpus, copies = write_tiny_corpus(tmp_path), f"{bucket}/survives"
    code, text = train(corpus.flags("--save-secondary", copies, folder=tmp_path / "first", train_iters=4))
    assert code == 0, text
    assert [candidate.step for candidate in find(Path(copies))] == [4]
    code, text = train(corpus.flags("--load", copies, "--eval-only", train_iters=6))
    assert code == 0, text
