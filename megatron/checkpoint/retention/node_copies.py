"""Copies of checkpoints on disks of the nodes themselves, so that a node that is lost takes nothing with it.

Two nodes hold each other's files: those that their own ranks wrote and those of the other's; of an odd number of nodes,
the last but one holds the files of the last three. The manifest is on every node. What a node holds need not be a whole
checkpoint; `collect` puts one together, in the folder that all nodes see, from what is left.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint.manifest import file_name, folder_name, read_manifest
from megatron.checkpoint.manifests.contents import Manifest
from megatron.checkpoint.publish import discard, open_temporary, remove_checkpoint
from megatron.checkpoint.retention.copying import CopyInProgress
from megatron.checkpoint.retention.summaries import steps_in
from megatron.checkpoint.storage import DISK, Storage, opened
from megatron.errors import CheckpointError, DamagedError, StorageError
from megatron.parallel.agreement import run_on_all, run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_gather_json
from megatron.parallel.processes import machine_id

FLAG = "--save-secondary"
_KEPT = 2  # the older one is there while the newer one is being written


@dataclass(frozen=True)
class Nodes:
    """Which ranks run on which node; nodes are numbered in the order of their lowest ranks.

    Attributes:
        of_ranks: the node of each rank.
    """

    of_ranks: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, mesh: ParallelMesh) -> Nodes:
        """Finds out; collective over `mesh.control`. Containers with names of their own are nodes."""
        names = [tuple(name) for name in all_gather_json([socket.gethostname(), machine_id()], mesh.control)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names), mesh.control.rank)

    @property
    def own(self) -> int:
        return self.of_ranks[self.rank]

    @property
    def is_first(self) -> bool:
        """Whether this is the lowest rank of its node, which makes and removes folders."""
        return self.of_ranks.index(self.own) == self.rank

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, its_node in enumerate(self.of_ranks) if its_node == node]

    def holds(self, manifest: Manifest) -> list[int]:
        """The numbers of the files of a checkpoint of this run that this node gets a copy of."""
        node_of = {file_name(rank): node for rank, node in enumerate(self.of_ranks)}
        count = max(self.of_ranks) + 1
        numbers = []
        for number, file in enumerate(manifest.files):
            node = node_of.get(file.name, number % count)
            if self.own in (node, _partner(node, count)):
                numbers.append(number)
        return numbers


@dataclass(frozen=True)
class _Held:
    """What the nodes hold of one checkpoint: for each of its files, the nodes that have it."""

    step: int
    digest: str
    holders: Mapping[int, list[int]]
    is_complete: bool


def copy_to_nodes(
    source: Path,
    directory: Path,
    mesh: ParallelMesh,
    nodes: Nodes,
    *,
    storage: Storage = DISK,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Copies each node's part of a checkpoint to a folder of its own disk; collective over the whole mesh.

    The ranks of a node share its files. The newest two copies stay. If one node cannot read or write its files, none
    appears.

    Raises:
        DamagedError, StorageError: as `copy_checkpoint`.
    """
    manifest = run_on_all(mesh, lambda: read_manifest(source, storage))
    run = run_on_first(mesh, lambda: secrets.token_hex(8))
    copy = CopyInProgress(source, directory, manifest, run, FLAG, storage, beat)
    numbers, neighbours = nodes.holds(manifest), nodes.ranks(nodes.own)
    need_bytes = sum(manifest.files[number].size_bytes for number in numbers)

    def on_first_of_node(work: Callable[[], object]) -> None:
        run_on_all(mesh, lambda: work() if nodes.is_first else None)

    try:
        on_first_of_node(lambda: open_temporary(copy.temporary, need_bytes, storage, FLAG))
        run_on_all(mesh, lambda: copy.copy_files(numbers[neighbours.index(nodes.rank) :: len(neighbours)]))
        on_first_of_node(copy.commit)
    except Exception:
        if nodes.is_first:
            discard(copy.temporary, storage)
        raise
    on_first_of_node(lambda: _prune(directory, manifest.step, storage))


def collect(
    directory: Path,
    target: Path,
    mesh: ParallelMesh,
    *,
    after_step: int,
    check: Callable[[Path, Mapping[str, Any]], None] | None = None,
    storage: Storage = DISK,
) -> Path | None:
    """Puts together the newest checkpoint of which some node has each file; collective over the whole mesh.

    Every byte is compared with its digest on the way, and a file that is damaged on one node is taken from another.

    Args:
        directory: of the copies, on each node.
        target: the folder, seen by all nodes, in which the checkpoint appears.
        after_step: only a newer checkpoint is worth it.
        check: called with each folder and its record; one for which it raises DamagedError is passed over.

    Returns:
        the checkpoint; None if the nodes hold none that is newer.

    Raises:
        StorageError: the target cannot be written.
    """
    nodes = Nodes.of(mesh)
    listed = run_on_all(mesh, lambda: _list(directory, after_step, check, storage) if nodes.is_first else [])
    for held in _newest_first(all_gather_json(listed, mesh.control), nodes):
        if not held.is_complete:
            if nodes.rank == 0:
                log.warning(f"{directory} of the nodes that are left holds iteration {held.step} only in part")
            continue
        made = _put_together(held, directory, target, mesh, nodes, storage)
        if made is not None:
            return made
    return None


def _partner(node: int, count: int) -> int:
    """The node that holds the files of another; of an odd number, the last one's are with the one before it."""
    return node ^ 1 if node ^ 1 < count else max(node - 1, 0)


def _prune(directory: Path, newest: int, storage: Storage) -> None:
    """Removes the copies before the newest; a run that goes back to an older step leaves those of later ones."""
    before = [step for step in steps_in(directory, storage) if step <= newest]
    for step in sorted(before, reverse=True)[_KEPT:]:
        try:
            remove_checkpoint(directory / folder_name(step), storage)
        except OSError as failure:
            log.warning(f"{directory / folder_name(step)} stays, because it cannot be removed: {failure}")


def _list(
    directory: Path, after_step: int, check: Callable[[Path, Mapping[str, Any]], None] | None, storage: Storage
) -> list[Any]:
    """Step, digest, number of files of each copy on this node, and the numbers of those that are there."""
    listed: list[Any] = []
    try:
        steps = list(steps_in(directory, storage)) if storage.exists(directory) else []
    except OSError as failure:  # a disk that fails must not end the start of the other nodes
        log.warning(f"passing over the copies in {directory}: {failure}")
        return []
    for step in steps:
        folder = directory / folder_name(step)
        if step <= after_step:
            continue
        try:
            manifest = read_manifest(folder, storage)
            if check is not None:
                check(folder, manifest.record)
        except (CheckpointError, StorageError) as failure:
            log.warning(f"passing over the copy {folder}: {failure}")
            continue
        there = [number for number, file in enumerate(manifest.files) if _size(folder / file.name, storage) is not None]
        listed.append([step, manifest.digest, len(manifest.files), there])
    return listed


def _size(path: Path, storage: Storage) -> int | None:
    try:
        with opened(storage, path) as (_, size_bytes):
            return size_bytes
    except OSError:
        return None


def _newest_first(listed: list[list[Any]], nodes: Nodes) -> list[_Held]:
    holders: dict[tuple[int, str], dict[int, list[int]]] = {}
    counts: dict[tuple[int, str], int] = {}
    for rank, of_rank in enumerate(listed):
        for step, digest, count, numbers in of_rank:
            counts[step, digest] = count
            for number in numbers:
                holders.setdefault((step, digest), {}).setdefault(number, []).append(nodes.of_ranks[rank])
    order = sorted(counts, reverse=True)
    return [_Held(*key, held := holders.get(key, {}), len(held) == counts[key]) for key in order]


def _put_together(
    held: _Held, directory: Path, target: Path, mesh: ParallelMesh, nodes: Nodes, storage: Storage
) -> Path | None:
    """Copies the files of one checkpoint from the nodes that hold them; None if a file is damaged wherever it is."""
    source = directory / folder_name(held.step)
    holders = {number: list(its_nodes) for number, its_nodes in held.holders.items()}
    run = run_on_first(mesh, lambda: secrets.token_hex(8))
    keeper = nodes.ranks(min(node for its_nodes in holders.values() for node in its_nodes))[0]
    has_copy = any(nodes.own in its_nodes for its_nodes in holders.values())
    manifest = run_on_all(mesh, lambda: read_manifest(source, storage) if has_copy else None)
    copy = None if manifest is None else CopyInProgress(source, target, manifest, run, "--load", storage, lambda: None)

    def on_keeper(work: Callable[[CopyInProgress], object]) -> None:
        run_on_all(mesh, lambda: work(copy) if copy is not None and nodes.rank == keeper else None)

    remaining = sorted(holders)
    try:
        on_keeper(lambda copy: open_temporary(copy.temporary, copy.size_bytes, storage, "--load"))
        while remaining:
            plan = {number: _reader(number, holders[number], nodes) for number in remaining}
            own = [number for number, (_, rank) in plan.items() if rank == nodes.rank]
            damaged = run_on_all(mesh, lambda own=own: [] if copy is None else _copy_good(copy, own))  # type: ignore[misc]
            remaining = sorted(number for numbers in all_gather_json(damaged, mesh.control) for number in numbers)
            for number in remaining:
                holders[number].remove(plan[number][0])
            if not all(holders[number] for number in remaining):
                on_keeper(lambda copy: discard(copy.temporary, storage))
                return None
        on_keeper(CopyInProgress.commit)
    except Exception:
        if copy is not None and nodes.rank == keeper:
            discard(copy.temporary, storage)
        raise
    if nodes.rank == 0:
        log.warning(f"iteration {held.step} was put together in {target} from the copies that nodes hold ({FLAG})")
    return target / folder_name(held.step)


def _reader(number: int, holders: list[int], nodes: Nodes) -> tuple[int, int]:
    """The node and the rank that copy a file, spread over all that can."""
    node = holders[number % len(holders)]
    ranks = nodes.ranks(node)
    return node, ranks[number % len(ranks)]


def _copy_good(copy: CopyInProgress, numbers: list[int]) -> list[int]:
    """Copies files and returns the numbers of those that are damaged here."""
    damaged = []
    for number in numbers:
        try:
            copy.copy_files([number])
        except DamagedError as damage:
            log.warning(f"taking it from another node: {damage}")
            copy.storage.remove_file(copy.temporary / copy.manifest.files[number].name)
            damaged.append(number)
    return damaged
