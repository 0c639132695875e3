"""A process that dies at any operation on a store: what is found afterwards is whole, and the rest is removed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.checkpoint import find, verify
from megatron.checkpoint.publish import remove_checkpoint, sweep
from megatron.checkpoint.retention.copying import copy_checkpoint
from megatron.checkpoint.retention.pruning import Pruner, RetentionRules
from megatron.checkpoint.storage import DISK
from tests.checkpoint.retention.checkpoints import MESH, Death, loaded_seed, save_step

fsspec = pytest.importorskip("fsspec")
memory = pytest.importorskip("fsspec.implementations.memory")
NUMBERS = itertools.count()


class MortalStore:
    """The store in memory, whose process dies before one of the operations that change something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operations: list[str] = []
        self.copies = 0
        self.ends_at: int | None = None
        self._patch(monkeypatch, memory.MemoryFileSystem, "cp_file")
        self._patch(monkeypatch, memory.MemoryFileSystem, "rm")
        self._patch(monkeypatch, memory.MemoryFile, "commit")

    def _patch(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        real = getattr(owner, name)

        def operation(*words: object, **named: object) -> object:
            if self.ends_at is not None and len(self.operations) >= self.ends_at:
                raise Death(f"at operation {self.ends_at}, {name}")
            self.operations.append(name)
            self.copies += name == "cp_file"
            return real(*words, **named)

        monkeypatch.setattr(owner, name, operation)

    def at_every_operation(self, prepare: Callable[[], Path], work: Callable[[Path], object]) -> Iterator[Path]:
        """Folders in which `work` died at its first, second, ... operation; it survived in the last one."""
        whole = prepare()
        self.operations.clear()
        work(whole)
        for place in range(len(self.operations)):
            folder = prepare()
            self.operations.clear()
            self.ends_at = place
            with pytest.raises(Death):
                work(folder)
            self.ends_at = None
            yield folder
        yield whole


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MortalStore:
    return MortalStore(monkeypatch)


def copied(source: Path, place: Path) -> object:
    return copy_checkpoint(source, place, MESH, flag="--save-secondary", replaces=True)


def all_are_whole(place: Path) -> bool:
    return all(verify(candidate.path) for candidate in find(place))


def run_with(starts: list[Path]) -> Path:
    """A new folder of the store with copies of some checkpoints."""
    place = Path(f"memory://mortal/run{next(NUMBERS)}")
    for start in starts:
        copied(start, place)
    return place


@pytest.mark.parametrize("before", [{1: 1}, {1: 1, 2: 9}, {}], ids=["new step", "same step", "first"])
def test_a_copy_that_dies_leaves_what_was_there(store: MortalStore, before: dict[int, int], tmp_path: Path) -> None:
    source = save_step(tmp_path / "source", 2)
    starts = [save_step(tmp_path / "start", step, seed=seed) for step, seed in before.items()]

    seeds = []
    for place in store.at_every_operation(lambda: run_with(starts), lambda place: copied(source, place)):
        seeds.append(loaded_seed(place) if find(place) else 0)
        assert all_are_whole(place)
        copied(source, place)
        assert loaded_seed(place) == 2 and all_are_whole(place)
        steps = [f"iter_{step:07d}" for step in sorted({*before, 2})]
        assert DISK.names(place) == [*steps, "latest_checkpointed_iteration.txt"]
    old = before.get(2, before.get(1, 0))
    assert set(seeds) == {old, 2} and seeds == sorted(seeds, key=lambda seed: seed == 2) and len(seeds) >= 4
    assert bool(store.copies) == (2 in before), "only what is replaced is copied"


def test_a_deletion_that_dies_leaves_the_checkpoint_whole_or_gone(store: MortalStore, tmp_path: Path) -> None:
    starts = [save_step(tmp_path / "start", step) for step in (1, 2)]

    left = []
    for place in store.at_every_operation(
        lambda: run_with(starts), lambda place: remove_checkpoint(place / "iter_0000001", DISK)
    ):
        left.append([candidate.step for candidate in find(place)])
        assert loaded_seed(place) == 2 and all_are_whole(place)
        sweep(place, DISK)
        Pruner(RetentionRules(1), DISK).apply(place / "iter_0000002")
        assert DISK.names(place) == ["iter_0000002", "latest_checkpointed_iteration.txt"]
    assert left == [[2, 1]] + [[2]] * (len(left) - 1) and len(left) > 2 and not store.copies
