"""Campaigns notice planted problems: what each of them would miss if its checks were not there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from campaigns.campaign import Plan, Summary
from campaigns.damage import checkpoint_mutations, hostile_checkpoints
from campaigns.damage.checkpoint_mutations import MUTATIONS, NEWER, Unnoticed, load_damaged, undamaged
from campaigns.damage.crash_states import Disk, Recording, merged, record, recover, run_state, states
from campaigns.damage.hostile_checkpoints import STEPS, run, use, write_directory
from campaigns.damage.hostile_payloads import PAYLOADS, Place
from campaigns.kills.tools import half_made
from campaigns.layouts.training import Outcome, distance
from megatron.checkpoint import reader
from megatron.checkpoint.manifest import MANIFEST_NAME, folder_name
from megatron.checkpoint.publish import publish
from megatron.checkpoint.storage import Storage
from megatron.parallel.pieces import PieceKey
from tests.checkpoint.made.versions import FORMS
from tests.helpers.machines.memory_disk import MemoryStorage, Operation, Tree


@pytest.fixture(scope="module")
def logs() -> list[list[Operation]]:
    """The file operations of four ranks that save."""
    return record()


@pytest.mark.parametrize(
    ("name", "path"),
    [("sync", ""), ("sync directory", "."), ("sync directory", "iter")],
    ids=["file", "directory", "folder"],
)
def test_a_save_that_skips_a_sync_loses_checkpoints(logs: list[list[Operation]], name: str, path: str) -> None:
    def is_skipped(operation: Operation) -> bool:
        return operation.name == name and (name == "sync" or (operation.path == ".") == (path == "."))

    first_save = merged(logs).committed[0][0]
    kept = [operation for operation in merged(logs).operations[:first_save] if not is_skipped(operation)]
    every = states(Recording(kept, [(len(kept), 1)]), Random(0))
    assert any(run_state(number, tree, committed).problem for number, (tree, committed) in enumerate(every))


def test_ranks_write_concurrently_in_every_order(logs: list[list[Operation]]) -> None:
    actual, other = merged(logs), merged(logs, Random(1))
    assert other.operations != actual.operations
    assert sorted(map(str, other.operations)) == sorted(map(str, actual.operations))
    assert other.committed == actual.committed
    before, _ = actual.committed[-1]
    tree: Tree = list(states(Recording(actual.operations[:before], ()), Random(0)))[-1][0]
    assert recover(tree, 5) == 5
    del tree["iter_0000004"]["pieces_00002.safetensors"]
    assert "seed 4 is loaded; seed 5 was committed" in run_state(1, tree, 5).problem


def test_only_synced_operations_are_certain() -> None:
    disk = Disk()
    for operation in (
        Operation("mkdir", "new"),
        Operation("create", "new/file"),
        Operation("write", "new/file", content=b"x" * 1000),
        Operation("sync", "new/file"),
        Operation("rename", "new", "old"),
    ):
        disk.do(operation)
    assert disk.root.entries(()) == {} and list(disk.root.entries((0, 1))) == ["old"]
    assert list(disk.root.entries((1,))) == ["old"]  # a rename may arrive before earlier operations
    operations = [Operation("create", "a"), Operation("write", "a", content=b"z" * 1100)]
    every = (tree for seed in range(40) for tree, _ in states(Recording(operations, ()), Random(seed)))
    contents = {tree["a"] for tree in every if "a" in tree}
    assert {b"", b"z" * 512, b"z" * 1024, b"z" * 1100, bytes(1100), bytes(512) + b"z" * 588} <= contents


def test_the_disk_in_memory_behaves_like_a_real_one(tmp_path: Path) -> None:
    root = Path("/run")
    for storage, top in ((Storage(), tmp_path), (MemoryStorage(root, {}), root)):
        storage.make_directories(top / "a" / "b")
        handle = storage.create(top / "a" / "file")
        assert storage.write(handle, memoryview(b"content")) == 7
        storage.close(handle)
        with pytest.raises(FileExistsError):
            storage.create(top / "a" / "file")
        with pytest.raises(FileExistsError):
            storage.make_directory(top / "a")
        assert storage.names(top / "a") == ["b", "file"]
        handle, size_bytes = storage.open_to_read(top / "a" / "file")
        target = bytearray(4)
        assert (size_bytes, storage.read_into(handle, memoryview(target), 5)) == (7, 2)
        assert bytes(target[:2]) == b"nt" and storage.taken_bytes(top / "a") >= 7
        storage.close(handle)
        for path, error in ((top / "none", FileNotFoundError), (top / "a" / "file" / "x", NotADirectoryError)):
            with pytest.raises(error):
                storage.open_to_read(path)
        with pytest.raises(OSError):
            storage.open_to_read(top / "a" / "b")
        publish(top / "a" / "b", top / "a" / "c", "run", storage)
        with pytest.raises(OSError):
            storage.rename(top / "a" / "c", top / "a" / "file" / "x")
        storage.remove_tree(top / "a" / "c")
        storage.remove_file(top / "a" / "file")
        storage.remove_file(top / "a" / "file")
        assert storage.names(top / "a") == [] and not storage.is_link(top / "a")


@pytest.mark.parametrize("form", FORMS)
def test_damage_that_goes_unnoticed_is_a_problem(form: str) -> None:
    original = undamaged(form)

    def copied() -> Tree:
        return {name: dict(node) if isinstance(node, dict) else node for name, node in original.items()}

    assert load_damaged(copied(), original) == "equal"
    tree = copied()
    del tree[folder_name(NEWER)]
    with pytest.raises(Unnoticed, match="the older step was loaded without a message"):
        load_damaged(tree, original)
    tree = copied()
    tree[folder_name(NEWER)][MANIFEST_NAME] = tree[folder_name(NEWER - 1)][MANIFEST_NAME]
    assert load_damaged(tree, original) == "found"
    with pytest.raises(Unnoticed, match="nothing is found"):
        load_damaged({}, original)


def test_a_reader_that_verifies_nothing_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader.CheckpointReader, "verify", lambda self: None)
    monkeypatch.setattr(reader.zlib, "crc32", lambda content: 0)
    summary = Summary.of(checkpoint_mutations.run_cases(Plan(tmp_path, cases=len(MUTATIONS) * 4)))
    assert any("values were loaded that are not those of step 2" in each.problem for each in summary.problems)


def test_the_effect_of_a_payload_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_directory(tmp_path)
    place = Place(tmp_path / "run", tmp_path / "outside", tmp_path / "outside" / "canary")
    assert use("nothing", place).wrong == ""
    for text, work in (
        ("something outside was changed", lambda directory: (place.outside / "secret").write_text("x")),
        ("escapes are shown", lambda directory: print("\x1b[2J")),
        ("ZeroDivisionError", lambda directory: 1 / 0),
    ):
        monkeypatch.setitem(STEPS, "find", work)
        assert text in use("nothing", place).wrong
    PAYLOADS["pickle torch zip"](place)  # the pickles are armed: only this test unpickles one
    torch.load(place.newest / "pytorch_model.bin", weights_only=False)
    assert place.canary.exists() and "it was executed" in use("nothing", place).wrong
    monkeypatch.setattr(hostile_checkpoints, "PAYLOADS", {"bad": lambda place: 1 / 0})
    with pytest.raises(RuntimeError, match="the payload bad could not be made: its process ended with 1"):
        run("bad", tmp_path, tmp_path.with_suffix(".case"))


def test_files_that_are_half_made_or_lost_are_a_problem() -> None:
    before, after = {"kept": b"1", "old": b"2"}, {"kept": b"1", "made/a": b"3", "made/b": b"4"}
    assert half_made({"kept": b"1", ".made.tmp/a": b""}, before, after, 1) == ""
    assert half_made({"kept": b"1", "made/a": b"3"}, before, after, 1) == "made is visible and half made: ['made/a']"
    assert half_made({"old": b"2"}, before, after, 1) == "['kept'] were there before and are not intact"


def outcome(*, shift: float = 0.0, norm: float = 1.0, first: int = 0) -> Outcome:
    """The outcome of one of two ranks, which hold half of a tensor each."""
    key = PieceKey("a.weight", "weight", (2, 4), (0, 0), (2, 4), first, first + 4)
    values = np.arange(first, first + 4, dtype=np.float32)
    values[-1] += shift
    return Outcome("", ((2.0, norm),), ((key, values),))


def whole() -> Outcome:
    """The outcome of one process."""
    halves = outcome(), outcome(first=4)
    return dataclasses.replace(halves[0], pieces=halves[0].pieces + halves[1].pieces)


def test_a_difference_is_measured() -> None:
    apart = distance([outcome(), outcome(first=4, shift=0.5)], whole())
    assert apart.loss == apart.norm == 0 and apart.tensor == pytest.approx(0.5 / np.linalg.norm(np.arange(8.0)))
    assert distance([outcome(norm=1.5), outcome(first=4)], whole()).first_norm == 0.5
    assert np.isnan(distance([outcome(norm=np.nan), outcome(first=4)], whole()).norm)
    skipped = dataclasses.replace(whole(), curve=((2.0, np.nan),))
    assert distance([outcome(norm=np.nan), outcome(first=4, norm=np.nan)], skipped).norm == 0


def test_a_part_that_is_missing_or_there_twice_is_an_error() -> None:
    for parts in ([outcome()], [outcome(), outcome(), outcome(first=4)]):
        with pytest.raises(ValueError, match=r"'a.weight', 'weight'\).* missing or there twice"):
            distance(parts, whole())
