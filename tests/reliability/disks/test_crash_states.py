"""States that a power cut may leave of a save of four ranks: recovery loads a committed checkpoint, whole.

By hand, all of them: `python -m tests.reliability.disks.crash_states`.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from megatron.checkpoint.publish import publish
from megatron.checkpoint.storage import Storage
from tests.reliability.disks.crash_states import (
    SAVES,
    Campaign,
    Disk,
    Lost,
    Recording,
    merged,
    record,
    recover,
    run,
    states,
    subsets,
)
from tests.reliability.disks.memory_disk import MemoryStorage, Operation, Tree


@pytest.fixture(scope="module")
def logs() -> list[list[Operation]]:
    """What four ranks did."""
    return record()


def test_a_sample_of_all_crash_states(logs: list[list[Operation]], pytestconfig: pytest.Config) -> None:
    cases = pytestconfig.getoption("--cases") // 4
    campaign = run(cases, logs=logs, orders=2)
    assert campaign.failures == []
    assert campaign.states > cases // 2 and set(campaign.loaded) >= {0, 2, 3, 5}
    assert campaign.saved_again > campaign.states // 10


def test_the_ranks_write_at_once_in_every_order(logs: list[list[Operation]]) -> None:
    happened = merged(logs)
    assert len(logs) == 4 and [seed for _, seed in happened.committed] == [seed for _, seed in SAVES]
    other = merged(logs, Random(1))
    assert other.operations != happened.operations
    assert sorted(map(str, other.operations)) == sorted(map(str, happened.operations))
    assert other.committed == happened.committed
    tree = list(states(other, Random(0)))[-1][0]
    assert sorted(tree) == ["iter_0000004", "latest_checkpointed_iteration.txt"] and len(tree["iter_0000004"]) == 5


def tried(recording: Recording) -> Campaign:
    """All states of a recording."""
    campaign = Campaign()
    for tree, committed in states(recording, Random(0)):
        campaign.add(tree, committed)
    return campaign


@pytest.mark.parametrize(
    ("left_out", "why"),
    [
        (lambda operation: operation.name == "sync", "loaded with other values|nothing is found|none of the"),
        (lambda operation: operation.name == "sync directory" and operation.path == ".", "is loaded; seed|nothing is"),
        (
            lambda operation: operation.name == "sync directory" and operation.path != ".",
            "nothing is found|none of the",
        ),
    ],
    ids=["no sync of files", "no sync of the directory", "no sync of the folder"],
)
def test_a_save_that_syncs_less_loses_checkpoints(logs: list[list[Operation]], left_out: object, why: str) -> None:
    """The campaign finds what each of the syncs is there for."""
    first_save = merged(logs).committed[0][0]
    kept = [one for one in merged(logs).operations[:first_save] if not left_out(one)]  # type: ignore[operator]
    campaign = tried(Recording(kept, [(len(kept), 1)]))
    assert campaign.failures
    with pytest.raises(Lost, match=why):
        raise Lost("\n".join(campaign.failures))


def test_only_what_was_synced_is_certain() -> None:
    disk = Disk()
    for operation in (
        Operation("mkdir", "new"),
        Operation("create", "new/file"),
        Operation("write", "new/file", content=b"x" * 1000),
        Operation("sync", "new/file"),
        Operation("write", "new/file", content=b"y" * 600),
        Operation("rename", "new", "old"),
    ):
        disk.do(operation)
    assert disk.root.entries(()) == {} and list(disk.root.entries((0, 1))) == ["old"]
    assert list(disk.root.entries((1,))) == ["old"]  # a rename may arrive without what was done before it
    operations = [Operation("create", "a"), Operation("write", "a", content=b"z" * 1100)]
    every = (tree for seed in range(40) for tree, _ in states(Recording(operations, ()), Random(seed)))
    found = {tree["a"] for tree in every if "a" in tree}
    assert {b"", b"z" * 512, b"z" * 1024, b"z" * 1100, bytes(1100), bytes(512) + b"z" * 588} <= found
    assert subsets(2, Random(0)) == [(0, 1), (0,), (1,), ()]
    assert (0, 1, 3, 4, 5, 6) in subsets(7, Random(0))


def test_a_lost_checkpoint_is_noticed(logs: list[list[Operation]]) -> None:
    recording = merged(logs)
    before, _ = recording.committed[-1]
    tree: Tree = list(states(Recording(recording.operations[:before], ()), Random(0)))[-1][0]
    assert recover(tree, 5) == 5
    del tree["iter_0000004"]["pieces_00002.safetensors"]
    assert recover(tree, 4) == 4
    with pytest.raises(Lost, match="seed 4 is loaded; seed 5 was committed"):
        recover(tree, 5)
    with pytest.raises(Lost, match="nothing is found; seed 4 was committed"):
        recover({}, 4)


def test_the_disk_in_memory_behaves_like_a_real_one(tmp_path: Path) -> None:
    """The same calls, the same errors: what the campaign reads is what the project would."""
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
        for place, error in ((top / "none", FileNotFoundError), (top / "a" / "file" / "x", NotADirectoryError)):
            with pytest.raises(error):
                storage.open_to_read(place)
        with pytest.raises(OSError):
            storage.open_to_read(top / "a" / "b")
        publish(top / "a" / "b", top / "a" / "c", "run", storage)
        with pytest.raises(OSError):
            storage.rename(top / "a" / "c", top / "a" / "file" / "x")
        storage.remove_tree(top / "a" / "c")
        storage.remove_file(top / "a" / "file")
        storage.remove_file(top / "a" / "file")
        assert storage.names(top / "a") == [] and not storage.is_link(top / "a")
