"""Damages every kind of file of a checkpoint directory: damage is found before it is used, or makes no difference.

    python -m campaigns.run checkpoint-damage --cases 100000

A directory holds the checkpoints of two steps, of four files each. The newer one, or a file next to it, is damaged.
Loading must give the newer one with the values that were saved, or give the older one and say why; no value of a
damaged checkpoint may be handed out before the damage is noticed. A damaged lock is taken over, or refused in words.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import torch

from campaigns.campaign import Plan, Result
from megatron.checkpoint import CheckpointLock, load_newest, newest_record
from megatron.checkpoint.lock import LOCK_NAME, Holder
from megatron.checkpoint.manifest import MANIFEST_NAME, file_name, folder_name
from megatron.checkpoint.manifests.compaction import FileDescription, compact, describe
from megatron.checkpoint.manifests.contents import StoredFile
from megatron.checkpoint.manifests.writing import manifest_texts
from megatron.checkpoint.publish import HINT_NAME
from megatron.checkpoint.reader import Accept, verify
from megatron.checkpoint.saving import write_pieces
from megatron.checkpoint.snapshot import take_snapshot
from megatron.errors import DamagedError, MegatronError
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import PieceKey
from tests.checkpoint.made.fake_pieces import cut_for_ranks, make_state, whole_sink
from tests.checkpoint.made.versions import FORMS, rewrite
from tests.helpers.machines.memory_disk import Link, MemoryStorage, Tree

MESH = ParallelMesh.single()
ROOT = Path("/run")
RANKS, CHUNK_BYTES = 4, 1024
OLDER, NEWER = 1, 2
LOCK = "lock"
SHAPES: dict[str, tuple[int, ...]] = {"decoder.weight": (24, 20), "decoder.bias": (24,), "scale": ()}
FILES = (MANIFEST_NAME, *(file_name(rank) for rank in range(RANKS)))
Mutation = Callable[[Random, Tree], None]


def write_checkpoint(tree: Tree, step: int, seed: int, run: str, form: str) -> None:
    """Writes the checkpoint of four ranks, as a save does or an older program did."""
    storage, folder = MemoryStorage(ROOT, tree), ROOT / folder_name(step)
    storage.make_directory(folder)
    files: list[StoredFile] = []
    described: list[FileDescription] = []
    for rank, part in enumerate(cut_for_ranks(make_state(SHAPES, seed=seed), RANKS, seed)):
        file, stored = write_pieces(folder / file_name(rank), take_snapshot(part), CHUNK_BYTES, storage)
        described.append(describe(stored))
        files.append(file)
    runs = compact(
        [description.numbers for description in described],
        [description.digest for description in described],
        {description.digest: description.rows for description in described},
    )
    root, _ = manifest_texts(step, run, {"seed": seed}, CHUNK_BYTES, files, runs)
    tree[folder.name][MANIFEST_NAME] = root
    rewrite(folder, form, storage)
    tree[folder.name] = {name: bytes(data) for name, data in tree[folder.name].items()}


def undamaged(form: str = "version 2") -> Tree:
    """A directory with two checkpoints; `.other` holds one of the newer step by another run."""
    tree: Tree = {HINT_NAME: str(NEWER).encode(), "run.json": b"{}"}
    write_checkpoint(tree, OLDER, OLDER, "run", form)
    write_checkpoint(tree, NEWER, NEWER, "run", form)
    other: Tree = {}
    write_checkpoint(other, NEWER, NEWER + 7, "other", form)
    return {**tree, ".other": other[folder_name(NEWER)]}


# --- mutations of bytes ---------------------------------------------------------------------------


def flip(draw: Random, data: bytearray) -> None:
    """One to eight bits."""
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def byte_run(draw: Random, data: bytearray) -> None:
    """A stretch reads as something else."""
    at, size = draw.randrange(len(data)), draw.choice((1, 2, 4, 16, 64, 300))
    size = min(size, len(data) - at)
    data[at : at + size] = draw.choice((draw.randbytes(size), b"\xff" * size, b" " * size, b"0" * size))


def zero_page(draw: Random, data: bytearray) -> None:
    """A page reads as zeros."""
    page = draw.choice((512, 4096))
    at = page * draw.randrange(-(-len(data) // page))
    data[at : at + page] = bytes(len(data[at : at + page]))


def truncate(draw: Random, data: bytearray) -> None:
    """The end is missing."""
    del data[
        draw.choice((0, draw.randrange(len(data)), len(data) - 1, len(data) - draw.randint(1, min(90, len(data))))) :
    ]


def extend(draw: Random, data: bytearray) -> None:
    """Something follows the end."""
    count = draw.choice((1, 2, 8, 512))
    data += draw.choice((bytes(count), draw.randbytes(count), bytes(data), bytes(data[-count:]), b"\n", b" "))


def insert(draw: Random, data: bytearray) -> None:
    """Everything behind a place is shifted."""
    at, size = draw.randrange(len(data)), draw.choice((1, 2, 8, 64))
    if draw.random() < 0.5:
        data[at:at] = draw.randbytes(size)
    else:
        del data[at : at + size]


def exchange(draw: Random, data: bytearray) -> None:
    """Two stretches of a file change places."""
    size = min(draw.choice((1, 4, 64, CHUNK_BYTES)), len(data) // 2)
    one, other = sorted(draw.randrange(len(data) - size + 1) for _ in range(2))
    if other - one >= size:
        data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


def digit(draw: Random, data: bytearray) -> None:
    """A digit is another one."""
    places = [at for at, letter in enumerate(data) if 48 <= letter <= 57]
    if places:
        data[draw.choice(places)] = draw.choice(b"0123456789")


BYTES: Mapping[str, Callable[[Random, bytearray], None]] = {
    "bit flip": flip, "byte run": byte_run, "zero page": zero_page, "truncated": truncate, "extended": extend,
    "shifted": insert, "exchanged": exchange, "digit": digit,
}  # fmt: skip


# --- mutations of files ---------------------------------------------------------------------------


def files_of(tree: Tree) -> list[str]:
    """The files of the newer checkpoint."""
    return sorted(tree[folder_name(NEWER)])


def lose(draw: Random, tree: Tree) -> None:
    """A file is missing."""
    del tree[folder_name(NEWER)][draw.choice(files_of(tree))]


def swap(draw: Random, tree: Tree) -> None:
    """Two files have exchanged names."""
    folder = tree[folder_name(NEWER)]
    one, other = draw.sample(files_of(tree), 2)
    folder[one], folder[other] = folder[other], folder[one]


def other_step(draw: Random, tree: Tree) -> None:
    """A file, or several, are those of the older step."""
    for name in draw.sample(files_of(tree), draw.choice((1, 1, 2, 4, 5))):
        tree[folder_name(NEWER)][name] = tree[folder_name(OLDER)][name]


def other_run(draw: Random, tree: Tree) -> None:
    """A file, or several, are those of another run at the same step; never all, which would be no damage."""
    for name in draw.sample(files_of(tree)[:-1], draw.choice((1, 1, 2, 3, 4))):
        tree[folder_name(NEWER)][name] = tree[".other"][name]


def duplicate(draw: Random, tree: Tree) -> None:
    """A file is there twice, under the name of another or under one that is not in the manifest."""
    folder = tree[folder_name(NEWER)]
    folder[draw.choice((*files_of(tree), "pieces_00004.safetensors", "copy"))] = folder[draw.choice(files_of(tree))]


def other_kind(draw: Random, tree: Tree) -> None:
    """A link, a directory or nothing stands where a file should."""
    name = draw.choice(files_of(tree))
    tree[folder_name(NEWER)][name] = draw.choice((Link("elsewhere"), {}, {name: tree[folder_name(NEWER)][name]}, b""))


def other_number(draw: Random, tree: Tree) -> None:
    """The folder of a step has the number of another one."""
    step = draw.choice((3, 4, 10**6, 10**17))
    tree[folder_name(step)] = dict(tree[folder_name(draw.choice((OLDER, NEWER)))])


def other_folder(draw: Random, tree: Tree) -> None:
    """A later step is a file, a link or an empty folder."""
    tree[folder_name(3)] = draw.choice((b"", b"{}", Link(folder_name(2)), {}, {"pieces_00000.safetensors": b""}))


def hint(draw: Random, tree: Tree) -> None:
    """The file that points to the newest checkpoint has other content, or is missing."""
    tree[HINT_NAME] = draw.choice((b"", b"1", b"99", b"release", draw.randbytes(9), b"2" * 9999, Link("x"), {}))
    if draw.random() < 0.1:
        del tree[HINT_NAME]


def _of_bytes(name: str, kind: str) -> Mutation:
    def mutate(draw: Random, tree: Tree) -> None:
        holder = tree if kind == "hint" else tree[folder_name(NEWER)]
        named = [file for file in files_of(tree) if file.startswith("pieces") == (kind == "pieces")]
        place = HINT_NAME if kind == "hint" else draw.choice(named)
        data = bytearray(holder[place])
        BYTES[name](draw, data)
        holder[place] = bytes(data)

    return mutate


MUTATIONS: Mapping[str, Mutation] = {
    **{f"{kind}: {name}": _of_bytes(name, kind) for kind in ("manifest", "pieces") for name in BYTES},
    **{f"hint: {name}": _of_bytes(name, "hint") for name in ("bit flip", "truncated", "extended")},
    "hint": hint, "missing file": lose, "swapped files": swap, "file of another step": other_step,
    "file of another run": other_run, "duplicate file": duplicate, "other kind of file": other_kind,
    "other number": other_number, "other folder": other_folder,
}  # fmt: skip


# --- loading --------------------------------------------------------------------------------------


class Unnoticed(Exception):
    """Something damaged was used, or something good was not found."""


STATES = {step: make_state(SHAPES, seed=step) for step in (OLDER, NEWER)}


@dataclass
class Attempts:
    """Requests whole tensors, and records the values of each attempt to load separately."""

    given: list[dict[PieceKey, torch.Tensor]] = field(default_factory=list)

    def wanted(self) -> Iterator[tuple[PieceKey, Accept]]:
        """The pieces to load; called once per attempt."""
        taken: dict[PieceKey, torch.Tensor] = {}
        self.given.append(taken)
        for key, _ in whole_sink(STATES[NEWER]).expected:
            yield key, lambda values, key=key, taken=taken: taken.__setitem__(key, values.clone())  # type: ignore[misc]


def load_damaged(tree: Tree, original: Tree) -> str:
    """Loads and returns "found" if the damage was detected, "equal" if it makes no difference.

    Raises:
        Unnoticed: neither.
    """
    storage, attempts, messages = MemoryStorage(ROOT, tree), Attempts(), io.StringIO()
    with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(messages):
        found = newest_record(ROOT, MESH, storage=storage)
        loaded = load_newest(ROOT, attempts.wanted, MESH, known=found, storage=storage)
    if loaded is None:
        raise Unnoticed("nothing is found")
    step = int(loaded.record["seed"])
    expected = {key: values for key, values in whole_sink(STATES.get(step, {})).expected}
    *failed, given = attempts.given
    if any(failed):
        raise Unnoticed("values of a damaged checkpoint were handed out")
    if given.keys() != expected.keys() or not all(torch.equal(given[key], expected[key]) for key in expected):
        raise Unnoticed(f"values were loaded that are not those of step {step}")
    name = folder_name(NEWER)
    if step == OLDER:
        if f"skipping checkpoint {ROOT / name}" not in messages.getvalue():
            raise Unnoticed(f"the older step was loaded without a message: {messages.getvalue()[:300]}")
        return "found"
    if any(tree[name].get(file) != content for file, content in original[name].items()):
        try:
            verify(ROOT / name, storage)
        except DamagedError:
            return "found by verify"
        raise Unnoticed("a changed file was loaded, and a check of every byte finds nothing")
    return "found" if "skipping checkpoint" in messages.getvalue() else "equal"


def take_damaged_lock(draw: Random, folder: Path) -> str:
    """Damages the lock of an ended job, takes it, and returns the outcome."""
    holder = asdict(Holder.this_process())
    holder.update(
        draw.choice(
            (
                {"process_id": 2**22 + 7},
                {"machine": "another"},
                {"released": True},
                {"host": "\x1b[2J"},
                {"counter": -1},
            )
        )
    )
    data = bytearray(json.dumps(holder).encode().ljust(1023) + b"\n")
    BYTES[draw.choice(sorted(BYTES))](draw, data)
    path = folder / LOCK_NAME
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    path.write_bytes(data)
    messages = io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(messages),
            CheckpointLock(folder, MESH, heartbeat_seconds=0.005, stale_seconds=0.005),
        ):
            return "lock taken over"
    except MegatronError as refusal:
        messages.write(str(refusal))
        return "lock refused"
    finally:
        if "\x1b" in messages.getvalue():
            raise Unnoticed(f"control characters are shown: {messages.getvalue()!r}")


def run_cases(plan: Plan) -> Iterator[Result]:
    """Damages checkpoint folders of every format in turn."""
    originals = [undamaged(form) for form in FORMS]
    names = plan.names([*sorted(MUTATIONS), LOCK])
    for number in plan.numbers:
        draw = plan.random(number)
        name = names[number % len(names)] if plan.only or draw.random() < 0.9 else draw.choice(sorted(MUTATIONS))
        outcome, problem = "failed", ""
        try:
            if name == LOCK:
                outcome = take_damaged_lock(draw, plan.folder)
            else:
                original = originals[number % len(originals)]
                tree = {entry: dict(node) if isinstance(node, dict) else node for entry, node in original.items()}
                MUTATIONS[name](draw, tree)
                if draw.random() < 0.05:
                    with contextlib.suppress(KeyError, ValueError, TypeError, IndexError):  # it is gone
                        MUTATIONS[draw.choice(sorted(MUTATIONS))](draw, tree)
                outcome = load_damaged(tree, original)
        except Exception as failure:  # of whatever kind: that is what the campaign looks for
            problem = f"{type(failure).__name__}: {failure}"
        yield Result(number, name, outcome, problem)
