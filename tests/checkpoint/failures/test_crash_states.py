"""Every state that a power cut may leave behind during saves: recovery loads a committed checkpoint, whole.

The operations of a run of saves are recorded. For every prefix of them, files whose last bytes were not synced lose all
or part of those (torn anywhere, or turned to zeros), and directory changes that were not synced are lost from the end,
as a journal loses them. Each state is laid out on a real file system and loaded.
"""

from __future__ import annotations

import itertools
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron.checkpoint import SaveOptions, load_newest, save
from megatron.errors import CheckpointError
from megatron.parallel.mesh import ParallelMesh
from tests.checkpoint.made.fake_pieces import cut_for_ranks, make_state, whole_sink
from tests.helpers.machines.memory_disk import Operation, RecordingStorage

MESH = ParallelMesh.single()
SHAPES: dict[str, tuple[int, ...]] = {"a": (9, 5), "b": (40,)}


@dataclass
class Inode:
    """A file's bytes, and how many of them (a prefix) are safely on the disk."""

    content: bytearray = field(default_factory=bytearray)
    synced: int = 0


def replay(log: list[Operation], lost_entries: int) -> dict[str, Inode | None]:
    """The tree after the operations (None marks a directory), without the last directory changes that nobody synced."""
    last_sync = max((at for at, operation in enumerate(log) if operation.name == "sync directory"), default=-1)
    changes = [at for at, o in enumerate(log) if o.name in ("mkdir", "create", "rename", "unlink", "rmdir")]
    loose = [at for at in changes if at > last_sync]
    lost = set(loose[len(loose) - lost_entries :]) if lost_entries else set()
    inodes: dict[str, Inode] = {}  # by the name as the running program sees it
    seen: dict[str, Inode | None] = {}
    for at, operation in enumerate(log):
        path = operation.path
        if operation.name == "create":
            inodes[path] = Inode()
        elif operation.name == "write":
            inodes[path].content += operation.content
        elif operation.name == "sync":
            inodes[path].synced = len(inodes[path].content)
        elif operation.name == "rename":
            for tree in (inodes, seen) if at not in lost else (inodes,):
                move(tree, path, operation.target)  # type: ignore[arg-type]
        if at in lost:
            continue
        if operation.name == "mkdir":
            seen[path] = None
        elif operation.name == "create":
            seen[path] = inodes[path]
        elif operation.name in ("unlink", "rmdir"):
            seen.pop(path, None)
    return seen


def move(tree: dict[str, Inode | None], source: str, target: str) -> None:
    for name in [name for name in tree if name == source or name.startswith(source + "/")]:
        tree[target + name[len(source) :]] = tree.pop(name)


def after_crash(tree: dict[str, Inode | None], damage: str, random_numbers: random.Random) -> dict[str, bytes | None]:
    """What the disk holds: bytes that were not synced are kept, lost, torn, or zero."""
    disk: dict[str, bytes | None] = {}
    for name, inode in sorted(tree.items()):
        if inode is None:
            disk[name] = None
            continue
        content = bytes(inode.content)
        loose = len(content) - inode.synced
        if damage == "lost":
            content = content[: inode.synced]
        elif damage == "torn":
            content = content[: inode.synced + random_numbers.randint(0, loose)]
        elif damage == "zero":
            content = content[: inode.synced] + bytes(loose)
        if "/" not in name or name.rpartition("/")[0] in tree:
            disk[name] = content
    return disk


def lay_out(disk: dict[str, bytes | None], directory: Path) -> None:
    """Writes a state to a real directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, content in disk.items():
        if content is None:
            (directory / name).mkdir()
        else:
            (directory / name).write_bytes(content)


def record_saves(root: Path) -> tuple[list[Operation], list[tuple[int, int]]]:
    """Four saves, the third of a step that exists: what they did, and how long that was when each was committed."""
    root.mkdir()
    storage, committed = RecordingStorage(root), []
    for seed, step in enumerate((1, 2, 2, 3)):
        pieces = cut_for_ranks(make_state(SHAPES, ("weight",), seed), 1, seed)[0]
        save(root, step, pieces, {"seed": seed}, MESH, SaveOptions(chunk_bytes=256, storage=storage))
        committed.append((len(storage.log), seed))
    return storage.log, committed


def test_no_crash_state_loses_a_committed_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operations, commits = record_saves(tmp_path / "run")
    random_numbers = random.Random(0)
    seen: set[tuple] = set()
    states = 0
    damages = ("kept", "lost", "zero", "torn", "torn", "torn", "torn", "torn", "torn")
    for end, damage in itertools.product(range(len(operations) + 1), damages):
        log = operations[:end]
        committed = max((seed for length, seed in commits if length <= end), default=None)
        for lost_entries in range(6):
            disk = after_crash(replay(log, lost_entries), damage, random_numbers)
            state = (tuple(disk.items()), committed)
            if state in seen:
                continue
            seen.add(state)
            states += 1
            lay_out(disk, tmp_path / "crash")
            sink = whole_sink(make_state(SHAPES, ("weight",)))
            try:
                found = load_newest(tmp_path / "crash", sink.wanted, MESH)
            except CheckpointError:
                found = None
            if found is None:
                assert committed is None, (end, damage, lost_entries)
                continue
            seed = found.record["seed"]
            assert committed is None or seed >= committed, (end, damage, lost_entries)
            sink.expected = whole_sink(make_state(SHAPES, ("weight",), seed)).expected
            sink.check()
        capsys.readouterr()
    assert states > 300


def test_the_next_save_works_from_every_crash_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operations, _ = record_saves(tmp_path / "run")
    random_numbers = random.Random(1)
    pieces = cut_for_ranks(make_state(SHAPES, ("weight",), 9), 1, 9)[0]
    for end in range(0, len(operations) + 1, 3):
        disk = after_crash(replay(operations[:end], end % 4), "torn", random_numbers)
        lay_out(disk, tmp_path / "crash")
        save(tmp_path / "crash", 4, pieces, {"seed": 9}, MESH, SaveOptions(chunk_bytes=256))
        sink = whole_sink(make_state(SHAPES, ("weight",), 9))
        assert load_newest(tmp_path / "crash", sink.wanted, MESH) is not None
        sink.check()
        assert not [path.name for path in (tmp_path / "crash").iterdir() if path.name.startswith(".tmp")]
        capsys.readouterr()
