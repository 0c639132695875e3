"""Every state that a power cut may leave on the disk while four ranks save, replace a step and delete old ones.

    python -m campaigns.run crash-states        all states; fewer with --cases N, spread over all of them

The operations of the saves are recorded. A state is a prefix of them, of which the disk holds everything that was
synced and some of the rest, as POSIX allows it: of each file's bytes that were not synced, all, none, a part that ends
at a sector, or zeros in their place; of the changes of each directory that were not synced, any subset, so that a
rename may arrive before or after what was done earlier. In each state the newest checkpoint that was committed, or a
newer one, must load whole.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from campaigns.campaign import Plan, Result
from megatron.checkpoint import SaveOptions, find, load_newest, newest_record, save
from megatron.checkpoint.manifest import folder_name
from megatron.checkpoint.publish import remove_checkpoint
from megatron.config import ParallelRequest
from megatron.errors import MegatronError
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from tests.checkpoint.made.fake_pieces import cut_for_ranks, make_state, whole_sink
from tests.helpers.machines.memory_disk import MemoryStorage, Operation, RecordingStorage, Tree, frozen
from tests.helpers.ranks import run_ranks

RANKS = 4
SECTOR_BYTES = 512
MESH = ParallelMesh.single()
SHAPES: dict[str, tuple[int, ...]] = {"a": (48, 40), "b": (90,)}
SAVES = ((1, 1), (2, 2), (2, 3), (3, 4), (4, 5))
"""Step and seed of each save; the third one replaces the second."""
DELETED = {3: (1,), 4: (2, 3)}
"""Which steps are deleted after the save of one."""
ROOT = Path("/run")
ALL_STATES = 10**6
ORDERS, FEW_ORDERS = 10, 1  # different orders of the ranks' operations; few for a small sample
_MOST_FOR_ALL_SUBSETS = 5  # of so many changes of a directory every subset is tried; of more, a part of them


# --- recording ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """The operations on a disk.

    Args:
        operations: in an order in which they may have happened.
        committed: how many operations there were when a save returned, and its seed.
    """

    operations: Sequence[Operation]
    committed: Sequence[tuple[int, int]]


def save_all(rank: int, directory: str) -> tuple[list[Operation], list[tuple[int, int]]]:
    """One rank's part of all saves; returns its operations, and when each save returned."""
    mesh = open_mesh(ParallelRequest())
    storage = RecordingStorage(Path(directory))
    returned = []
    for step, seed in SAVES:
        pieces = cut_for_ranks(make_state(SHAPES, ("weight",), seed), RANKS, seed)[rank]
        save(Path(directory), step, pieces, {"seed": seed}, mesh, SaveOptions(chunk_bytes=1024, storage=storage))
        returned.append((time.monotonic_ns(), seed))
        for old in DELETED.get(step, ()) if rank == 0 else ():
            remove_checkpoint(Path(directory) / folder_name(old), storage)
    return storage.log, returned


def record(ranks: int = RANKS) -> list[list[Operation]]:
    """Runs the saves on several ranks; a note records when the first rank returned from each."""
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(save_all, ranks, folder)
    logs = [log for log, _ in results]
    logs[0] = sorted(
        [*logs[0], *(Operation("committed", str(seed), at=at) for at, seed in results[0][1])],
        key=lambda operation: operation.at,
    )
    return logs


def merged(logs: Sequence[Sequence[Operation]], draw: Random | None = None) -> Recording:
    """The operations of all ranks as they happened, or in another order that the barriers of a save allow.

    The other ranks write between the making of the temporary folder and the writing of the manifest.
    """
    every = [operation for rank in logs for operation in rank]
    every.sort(key=lambda operation: operation.at)
    if draw is not None:
        every = _shuffled(logs, draw)
    operations: list[Operation] = []
    committed = []
    for operation in every:
        if operation.name == "committed":
            committed.append((len(operations), int(operation.path)))
        else:
            operations.append(operation)
    return Recording(operations, committed)


def _shuffled(logs: Sequence[Sequence[Operation]], draw: Random) -> list[Operation]:
    result: list[Operation] = []
    waiting: list[list[Operation]] = []
    others = [list(rank) for rank in logs[1:]]
    for operation in logs[0]:
        if operation.name == "mkdir":  # a save begins: the others write into this folder
            waiting = [[one for one in rank if one.path.startswith(operation.path + "/")] for rank in others]
        elif operation.name == "create" and operation.path.endswith("manifest.json"):
            while any(waiting):
                result.append(draw.choice([rank for rank in waiting if rank]).pop(0))
        elif any(waiting):
            for _ in range(draw.choice((1, 2, 3, 4))):
                left = [rank for rank in waiting if rank]
                if left:
                    result.append(draw.choice(left).pop(0))
        result.append(operation)
    return result


# --- what a crash leaves --------------------------------------------------------------------------


@dataclass(eq=False)
class File:
    """A file's bytes, and how many of them (a prefix) are certainly on the disk."""

    content: bytearray = field(default_factory=bytearray)
    synced: int = 0


@dataclass(eq=False)
class Folder:
    """A directory: the entries that are certainly on the disk, and the changes that are not."""

    synced: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def entries(self, kept: Sequence[int] | None = None) -> dict[str, File | Folder]:
        """The entries after some of the pending changes, by default all of them."""
        found: dict[str, File | Folder | None] = dict(self.synced)
        for number in range(len(self.pending)) if kept is None else kept:
            found.update(self.pending[number])
        return {name: node for name, node in found.items() if node is not None}


class Disk:
    """A disk to which operations are applied."""

    def __init__(self) -> None:
        self.root = Folder()

    def _place(self, path: str) -> tuple[Folder, str]:
        *way, name = Path(path).parts
        folder = self.root
        for part in way:
            found = folder.entries()[part]
            assert isinstance(found, Folder)
            folder = found
        return folder, name

    def _node(self, path: str) -> File | Folder:
        if path == ".":
            return self.root
        folder, name = self._place(path)
        return folder.entries()[name]

    def do(self, operation: Operation) -> None:
        """Applies one operation."""
        if operation.name in ("write", "sync", "sync directory"):
            node = self._node(operation.path)
            if operation.name == "write":
                assert isinstance(node, File)
                node.content += operation.content
            elif isinstance(node, File):
                node.synced = len(node.content)
            else:
                node.synced, node.pending = node.entries(), []
            return
        folder, name = self._place(operation.path)
        if operation.name in ("create", "mkdir"):
            folder.pending.append({name: File() if operation.name == "create" else Folder()})
        elif operation.name in ("unlink", "rmdir"):
            folder.pending.append({name: None})
        else:
            target, new_name = self._place(operation.target)
            assert operation.name == "rename" and target is folder
            folder.pending.append({name: None, new_name: self._node(operation.path)})


def subsets(count: int, draw: Random) -> list[tuple[int, ...]]:
    """The sets of changes that may have arrived: all, none, a prefix, any subset of few."""
    every = tuple(range(count))
    if count <= _MOST_FOR_ALL_SUBSETS:
        return [kept for size in range(count, -1, -1) for kept in itertools.combinations(every, size)]
    found = [every[:end] for end in range(count, -1, -1)]
    found += [every[:lost] + every[lost + 1 :] for lost in every]
    found += [(only,) for only in every]
    found += [tuple(number for number in every if draw.random() < 0.5) for _ in range(8)]
    return list(dict.fromkeys(found))


def content_after(file: File, damage: str, draw: Random) -> bytes:
    """The content of a file on the disk: bytes that were not synced are kept, lost, torn at a sector, or zero."""
    content, loose = bytes(file.content), len(file.content) - file.synced
    damage = draw.choice(DAMAGES) if damage == ANY_DAMAGE else damage
    if damage == "kept" or not loose:
        return content
    if damage == "lost":
        return content[: file.synced]
    if damage == "zero":
        return content[: file.synced] + bytes(loose)
    sectors = -(-len(content) // SECTOR_BYTES)
    if damage == "torn":
        end = SECTOR_BYTES * draw.randint(file.synced // SECTOR_BYTES, sectors)
        return content[: max(file.synced, min(end, len(content)))]
    holes = bytearray(content)
    for sector in range(file.synced // SECTOR_BYTES, sectors):
        if draw.random() < 0.5:
            begin = max(file.synced, sector * SECTOR_BYTES)
            end = min(len(content), (sector + 1) * SECTOR_BYTES)
            holes[begin:end] = bytes(max(0, end - begin))
    return bytes(holes)


def tree_after(folder: Folder, kept: dict[int, Sequence[int]], damage: str, draw: Random) -> Tree:
    """The content of a directory on the disk; `kept` lists the changes that arrived, by identity of the folder."""
    tree: Tree = {}
    for name, node in folder.entries(kept.get(id(folder))).items():
        if isinstance(node, Folder):
            tree[name] = tree_after(node, kept, damage, draw)
        else:
            tree[name] = content_after(node, damage, draw)
    return tree


DAMAGES = ("kept", "lost", "zero", "torn", "holes")
ANY_DAMAGE = "any"  # each file has its own
_WAYS = (*DAMAGES, *(ANY_DAMAGE for _ in range(7)))


def states(recording: Recording, draw: Random) -> Iterator[tuple[Tree, int]]:
    """Every state, each once, with the seed of the last save that had returned (0 for none)."""
    disk = Disk()
    seen: set[int] = set()
    for end in range(len(recording.operations) + 1):
        committed = max((seed for length, seed in recording.committed if length <= end), default=0)
        inner = [node for node in disk.root.entries().values() if isinstance(node, Folder) and node.pending]
        for kept_in_root in subsets(len(disk.root.pending), draw):
            lists = [[tuple(range(len(node.pending))), *_some(node, draw)] for node in inner]
            for choice in itertools.product(*lists):
                kept = {id(disk.root): kept_in_root, **{id(node): k for node, k in zip(inner, choice, strict=True)}}
                for damage in _WAYS:
                    tree = tree_after(disk.root, kept, damage, draw)
                    key = hash((frozen(tree), committed))
                    if key not in seen:
                        seen.add(key)
                        yield tree, committed
        if end < len(recording.operations):
            disk.do(recording.operations[end])


def _some(node: Folder, draw: Random) -> list[tuple[int, ...]]:
    every = subsets(len(node.pending), draw)
    return draw.sample(every, min(len(every), 10))


# --- recovery -------------------------------------------------------------------------------------


class Lost(Exception):
    """A state in which a committed checkpoint is not found, or something else is loaded."""


STATES = {seed: make_state(SHAPES, ("weight",), seed) for _, seed in SAVES}


def recover(tree: Tree, committed: int) -> int:
    """Loads the newest checkpoint of a state; returns its seed, 0 for none.

    Raises:
        Lost: what was committed is not there, or not whole.
    """
    storage = MemoryStorage(ROOT, tree)
    find(ROOT, storage=storage)
    found = newest_record(ROOT, MESH, storage=storage)
    sink = whole_sink(STATES[1])
    loaded = load_newest(ROOT, sink.wanted, MESH, known=found, storage=storage)
    if loaded is None or found is None:
        if committed or loaded is not found:
            raise Lost(f"nothing is found; seed {committed} was committed")
        return 0
    seed = int(loaded.record["seed"])
    if seed < committed:
        raise Lost(f"seed {seed} is loaded; seed {committed} was committed")
    sink.expected = whole_sink(STATES[seed]).expected
    try:
        sink.check()
    except AssertionError as wrong:
        raise Lost(f"seed {seed} is loaded with other values: {wrong}") from wrong
    return seed


def save_again(tree: Tree) -> None:
    """The next save cleans the state up and works.

    Raises:
        Lost: it does not, or something is left behind.
    """
    storage = MemoryStorage(ROOT, tree)
    pieces = cut_for_ranks(STATES[1], 1, 9)[0]
    save(ROOT, 9, pieces, {"seed": 1}, MESH, SaveOptions(chunk_bytes=1024, storage=storage))
    sink = whole_sink(STATES[1])
    found = load_newest(ROOT, sink.wanted, MESH, storage=storage)
    if found is None or found.path.name != "iter_0000009":
        raise Lost(f"the next save is not found, but {found}")
    sink.check()
    left = [name for name in tree if name.startswith((".tmp-", ".trash-"))]
    if left:
        raise Lost(f"the next save left {left}")


def run_state(number: int, tree: Tree, committed: int) -> Result:
    """Recovers from one state; every eighth is then saved to."""
    loaded, problem = 0, ""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            loaded = recover(tree, committed)
            if number % 8 == 0:
                save_again(tree)
        except (Lost, MegatronError, AssertionError, OSError) as failure:
            problem = f"{type(failure).__name__}: {failure}"
    outcome = f"loaded save {loaded}" if loaded else "nothing to load"
    return Result(number, f"save {committed} committed" if committed else "no save committed", outcome, problem)


def run_cases(plan: Plan) -> Iterator[Result]:
    """Runs all states, or as many random ones as the plan has; a number is the position among all states."""
    orders = FEW_ORDERS if plan.case is None and plan.cases < 1000 else ORDERS
    chosen: list[tuple[int, Tree, int]] = []
    state: tuple[int, Tree, int] = (0, {}, 0)
    draw = Random(f"spread {plan.seed}")
    for state in all_states(record(), plan.seed, orders):
        if plan.case is not None or plan.cases >= ALL_STATES:
            if plan.case in (None, state[0]):
                yield run_state(*state)
        elif len(chosen) < plan.cases - 1:
            chosen.append(state)
        elif (slot := draw.randrange(state[0] + 1)) < len(chosen):
            chosen[slot] = state
    if plan.case is None and plan.cases < ALL_STATES:  # the last state is always among them
        yield from (run_state(*each) for each in [*chosen, state])


def all_states(logs: Sequence[Sequence[Operation]], seed: int, orders: int) -> Iterator[tuple[int, Tree, int]]:
    """The number of each state, its files, and the seed of the last save that had returned."""
    number = 0
    for order in range(orders):
        recording = merged(logs, Random(f"{seed} {order}") if order else None)
        for tree, committed in states(recording, Random(f"states {seed} {order}")):
            yield number, tree, committed
            number += 1
