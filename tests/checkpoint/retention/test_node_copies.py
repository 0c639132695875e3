"""Copies on disks of nodes: whatever one node had is there when it is lost."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint import SaveOptions, load_newest, save
from megatron.checkpoint.manifest import file_name
from megatron.checkpoint.retention import node_copies
from megatron.checkpoint.retention.node_copies import Nodes, collect, copy_to_nodes
from megatron.config import ParallelRequest
from megatron.errors import StorageError
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from tests.checkpoint.made.fake_pieces import cut_for_ranks, make_state, whole_sink
from tests.checkpoint.retention.checkpoints import Unsynced, hidden, steps
from tests.helpers.ranks import run_ranks

OF_RANKS = (0, 0, 1, 2)
RANKS = len(OF_RANKS)
STORAGE = Unsynced()


def write(shared: Path, step: int, mesh: ParallelMesh) -> Path:
    pieces = cut_for_ranks(make_state(kinds=("master",), seed=step), RANKS, step)[mesh.control.rank]
    return save(shared, step, pieces, {"seed": step}, mesh, SaveOptions(chunk_bytes=512, storage=STORAGE))


def loads(shared: Path, mesh: ParallelMesh, step: int) -> None:
    sink = whole_sink(make_state(kinds=("master",), seed=step))
    found = load_newest(shared, sink.wanted, mesh, storage=STORAGE)
    assert found is not None and found.record == {"seed": step}
    sink.check()


def lose_disks(rank: int, folder: Path) -> list[str]:
    """Three nodes, one of two ranks, each with a disk of its own; the shared folder and, in turn, each disk is lost."""
    mesh = open_mesh(ParallelRequest())
    nodes = Nodes(OF_RANKS, rank)
    node_copies.Nodes.of = classmethod(lambda cls, mesh: nodes)  # type: ignore[method-assign,assignment]
    shared, disk, problems = folder / "shared", folder / f"disk{nodes.this}", []

    def on_first(work: object) -> None:
        node_copies.run_on_first(mesh, work)  # type: ignore[arg-type]

    def gone(place: Path) -> None:
        on_first(lambda: shutil.rmtree(place))

    for step in (1, 2, 3):
        copy_to_nodes(write(shared, step, mesh), disk, mesh, nodes, storage=STORAGE)
    assert steps(disk) == [2, 3] and not hidden(disk)
    assert collect(disk, shared, mesh, after_step=3, storage=STORAGE) is None
    gone(shared)
    on_first(lambda: shutil.copytree(folder, folder.with_name("kept")) and None)
    for lost in range(3):
        gone(folder / f"disk{lost}")
        made = collect(disk, shared, mesh, after_step=-1, storage=STORAGE)
        if made != shared / "iter_0000003" or hidden(shared):
            problems.append(f"without {lost}: {made}, {hidden(shared)}")
        loads(shared, mesh, 3)
        gone(shared)
        on_first(
            lambda lost=lost: shutil.copytree(folder.with_name("kept") / f"disk{lost}", folder / f"disk{lost}") and None
        )

    def damage() -> None:  # node 0 and node 1 hold each other's files
        for number, name in ((0, file_name(1)), (1, file_name(2))):
            path = folder / f"disk{number}" / "iter_0000003" / name
            content = bytearray(path.read_bytes())
            content[-3] ^= 1
            path.write_bytes(content)

    on_first(damage)
    assert collect(disk, shared, mesh, after_step=-1, storage=STORAGE) == shared / "iter_0000003"
    loads(shared, mesh, 3)
    gone(shared)
    on_first(lambda: (folder / "disk1" / "iter_0000003" / file_name(1)).unlink())  # node 0's is damaged
    assert collect(disk, shared, mesh, after_step=-1, storage=STORAGE) == shared / "iter_0000002"
    assert steps(shared) == [2] and not hidden(shared)
    on_first(lambda: (folder / "disk0" / "iter_0000003" / file_name(1)).unlink())
    gone(shared)
    assert collect(disk, shared, mesh, after_step=-1, storage=STORAGE) == shared / "iter_0000002"
    loads(shared, mesh, 2)
    on_first(lambda: (folder / "disk2").rename(folder / "away") and (folder / "disk2").write_text("") and None)
    with pytest.raises(StorageError, match="disk2"):
        copy_to_nodes(write(shared, 4, mesh), disk, mesh, nodes, storage=STORAGE)
    on_first(lambda: None)  # all have cleaned up
    assert nodes.this == 2 or (steps(disk) == [2, 3] and not hidden(disk))
    return problems


def test_any_one_disk_may_be_lost(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    assert run_ranks(lose_disks, RANKS, tmp_path / "nodes") == [[]] * RANKS


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_each_file_is_on_two_nodes_and_pairs_hold_each_others(count: int) -> None:
    partners = [node_copies._partner(node, count) for node in range(count)]
    assert count == 1 or all(node != partner for node, partner in enumerate(partners))
    pairs = count - count % 2
    assert all(partners[partners[node]] == node for node in range(pairs))


class FailingDisk(Unsynced):
    def names(self, path: Path) -> list[str]:
        raise OSError(errno.EIO, "the disk fails", str(path))


def test_a_disk_that_fails_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect(tmp_path, tmp_path / "shared", ParallelMesh.single(), after_step=-1, storage=FailingDisk()) is None
    assert f"skipping the copies in {tmp_path}: " in capsys.readouterr().err


def name_nodes(rank: int) -> str:
    node_copies.socket.gethostname = lambda: "ab"[rank > 0]  # type: ignore[assignment]
    nodes = Nodes.of(open_mesh(ParallelRequest()))
    return json.dumps([nodes.of_ranks, nodes.this, nodes.is_first, nodes.ranks(1)])


def test_nodes_are_told_apart_by_their_names() -> None:
    assert [json.loads(text) for text in run_ranks(name_nodes, 3)] == [
        [[0, 1, 1], 0, True, [1, 2]], [[0, 1, 1], 1, True, [1, 2]], [[0, 1, 1], 1, False, [1, 2]]
    ]  # fmt: skip
