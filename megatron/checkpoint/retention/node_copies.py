"""Copies of checkpoints on local disks of the nodes, which survive the loss of a node.

Nodes form pairs; each holds the files written by the ranks of both. With an odd number of nodes, the last but one holds
the files of the last three. Every node has the manifest. A node need not hold a complete checkpoint; `collect`
assembles one in the shared folder from the files of the remaining nodes.
"""

from __future__ import annotations

import functools
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
_KEPT = 2  # the older one remains while the newer one is written


@dataclass(frozen=True)
class Nodes:
    """The node of each rank; nodes are numbered in the order of their lowest ranks."""

    of_ranks: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, mesh: ParallelMesh) -> Nodes:
        """Finds the nodes; collective over `mesh.control`. Containers with different host names count as nodes."""
        names = [tuple(name) for name in all_gather_json([socket.gethostname(), machine_id()], mesh.control)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names), mesh.control.rank)

    @property
    def this(self) -> int:
        """The node of this rank."""
        return self.of_ranks[self.rank]

    @property
    def is_first(self) -> bool:
        """True on the lowest rank of each node, which creates and removes folders."""
        return self.of_ranks.index(self.this) == self.rank

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, other in enumerate(self.of_ranks) if other == node]

    def files(self, manifest: Manifest) -> list[int]:
        """The numbers of the files of a checkpoint that this node gets a copy of."""
        node_of = {file_name(rank): node for rank, node in enumerate(self.of_ranks)}
        count = max(self.of_ranks) + 1
        numbers = []
        for number, file in enumerate(manifest.files):
            node = node_of.get(file.name, number % count)
            if self.this in (node, _partner(node, count)):
                numbers.append(number)
        return numbers


@dataclass(frozen=True)
class _CopiedFiles:
    """The copied files of a checkpoint, with the nodes that hold each of them."""

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
    """Copies each node's share of a checkpoint to a folder on its local disk; collective over the whole mesh.

    The files of a node are divided among its ranks. The newest two copies are kept. No copy appears if any node cannot
    read or write its files.

    Raises:
        DamagedError, StorageError: see `copy_checkpoint`.
    """
    manifest = run_on_all(mesh, lambda: read_manifest(source, storage))
    run = run_on_first(mesh, lambda: secrets.token_hex(8))
    copy = CopyInProgress(source, directory, manifest, run, FLAG, storage, beat)
    numbers, neighbours = nodes.files(manifest), nodes.ranks(nodes.this)
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
    """Assembles the newest checkpoint whose files are all on some node; collective over the whole mesh.

    Verifies every byte; a file that is damaged on one node is read from another.

    Args:
        directory: the folder of the copies, on each node.
        target: the shared folder that receives the checkpoint.
        after_step: only a newer checkpoint is assembled.
        check: called with each folder and its record; the folder is skipped if it raises DamagedError.

    Returns:
        the checkpoint; None if the nodes have no newer one.

    Raises:
        StorageError: the target cannot be written.
    """
    nodes = Nodes.of(mesh)
    listed = run_on_all(mesh, lambda: _list(directory, after_step, check, storage) if nodes.is_first else [])
    for files in _newest_first(all_gather_json(listed, mesh.control), nodes):
        if not files.is_complete:
            if nodes.rank == 0:
                log.warning(f"{directory} on the remaining nodes has only a part of iteration {files.step}")
            continue
        path = _assemble(files, directory, target, mesh, nodes, storage)
        if path is not None:
            return path
    return None


def _partner(node: int, count: int) -> int:
    """The node that also holds the files of a node; the last of an odd number is paired with the one before it."""
    return node ^ 1 if node ^ 1 < count else max(node - 1, 0)


def _prune(directory: Path, newest: int, storage: Storage) -> None:
    """Removes old copies, except those of later steps, from before the run went back to an older one."""
    before = [step for step in steps_in(directory, storage) if step <= newest]
    for step in sorted(before, reverse=True)[_KEPT:]:
        try:
            remove_checkpoint(directory / folder_name(step), storage)
        except OSError as failure:
            log.warning(f"{directory / folder_name(step)} cannot be removed: {failure}")


def _list(
    directory: Path, after_step: int, check: Callable[[Path, Mapping[str, Any]], None] | None, storage: Storage
) -> list[Any]:
    """Step, digest, number of files, and present file numbers of each copy on this node."""
    listed: list[Any] = []
    try:
        steps = list(steps_in(directory, storage)) if storage.exists(directory) else []
    except OSError as failure:  # a disk that fails must not end the start of the other nodes
        log.warning(f"skipping the copies in {directory}: {failure}")
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
            log.warning(f"skipping the copy {folder}: {failure}")
            continue
        present = [
            number for number, file in enumerate(manifest.files) if _size(folder / file.name, storage) is not None
        ]
        listed.append([step, manifest.digest, len(manifest.files), present])
    return listed


def _size(path: Path, storage: Storage) -> int | None:
    try:
        with opened(storage, path) as (_, size_bytes):
            return size_bytes
    except OSError:
        return None


def _newest_first(listed: list[list[Any]], nodes: Nodes) -> list[_CopiedFiles]:
    holders: dict[tuple[int, str], dict[int, list[int]]] = {}
    counts: dict[tuple[int, str], int] = {}
    for rank, copies in enumerate(listed):
        for step, digest, count, numbers in copies:
            counts[step, digest] = count
            for number in numbers:
                holders.setdefault((step, digest), {}).setdefault(number, []).append(nodes.of_ranks[rank])
    order = sorted(counts, reverse=True)
    return [_CopiedFiles(*key, nodes_of := holders.get(key, {}), len(nodes_of) == counts[key]) for key in order]


def _assemble(
    files: _CopiedFiles, directory: Path, target: Path, mesh: ParallelMesh, nodes: Nodes, storage: Storage
) -> Path | None:
    """Copies the files of a checkpoint from the nodes that hold them; None if all copies of a file are damaged."""
    source = directory / folder_name(files.step)
    holders = {number: list(nodes_of) for number, nodes_of in files.holders.items()}
    run = run_on_first(mesh, lambda: secrets.token_hex(8))
    keeper = nodes.ranks(min(node for nodes_of in holders.values() for node in nodes_of))[0]
    has_copy = any(nodes.this in nodes_of for nodes_of in holders.values())
    manifest = run_on_all(mesh, lambda: read_manifest(source, storage) if has_copy else None)
    copy = None if manifest is None else CopyInProgress(source, target, manifest, run, "--load", storage, lambda: None)

    def on_keeper(work: Callable[[CopyInProgress], object]) -> None:
        run_on_all(mesh, lambda: work(copy) if copy is not None and nodes.rank == keeper else None)

    remaining = sorted(holders)
    try:
        on_keeper(lambda copy: open_temporary(copy.temporary, copy.size_bytes, storage, "--load"))
        while remaining:
            plan = {number: _reader(number, holders[number], nodes) for number in remaining}
            mine = [number for number, (_, rank) in plan.items() if rank == nodes.rank]
            damaged = run_on_all(mesh, functools.partial(_copy_good, copy, mine))
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
        log.warning(f"iteration {files.step} was assembled in {target} from the copies on the nodes ({FLAG})")
    return target / folder_name(files.step)


def _reader(number: int, holders: list[int], nodes: Nodes) -> tuple[int, int]:
    """The node and the rank that copy a file, spread over all that can."""
    node = holders[number % len(holders)]
    ranks = nodes.ranks(node)
    return node, ranks[number % len(ranks)]


def _copy_good(copy: CopyInProgress | None, numbers: list[int]) -> list[int]:
    """Copies files; returns the numbers of those that are damaged on this node."""
    damaged: list[int] = []
    if copy is None:
        return damaged
    for number in numbers:
        try:
            copy.copy_files([number])
        except DamagedError as damage:
            log.warning(f"reading the file from another node: {damage}")
            copy.storage.remove_file(copy.temporary / copy.manifest.files[number].name)
            damaged.append(number)
    return damaged
