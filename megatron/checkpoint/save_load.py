"""Saves and loads a checkpoint: all ranks together, all or nothing.

A save is written to a temporary folder, synced, described by a manifest, and then renamed; whatever happens before the
rename leaves every earlier checkpoint as it was. A load verifies on all ranks before a tensor changes on any.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.checkpoint.layout import Catalogue, StoredPiece, as_kind, check_complete, whole
from megatron.checkpoint.lock import CheckpointLock
from megatron.checkpoint.manifest import (
    CHUNK_BYTES,
    ITEM_BYTES,
    MANIFEST_NAME,
    Manifest,
    StoredFile,
    file_name,
    folder_name,
    folder_step,
    manifest_bytes,
    read_manifest,
    record_text,
)
from megatron.checkpoint.reader import CheckpointReader, Wanted, check_files, verify_files
from megatron.checkpoint.storage import Storage, cannot_write, write_file
from megatron.checkpoint.together import on_first, together
from megatron.checkpoint.writer import Pieces, write_pieces
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max
from megatron.parallel.pieces import Kind, PieceKey

HINT_NAME = "latest_checkpointed_iteration.txt"
TEMPORARY_PREFIX = ".tmp-"
ASIDE_PREFIX = ".old-"


def save(
    directory: Path,
    step: int,
    pieces: Pieces,
    record: Mapping[str, Any],
    mesh: ParallelMesh,
    *,
    lock: CheckpointLock | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    storage: Storage | None = None,
) -> Path:
    """Writes `directory/iter_{step:07d}`; collective over the whole mesh.

    Args:
        pieces: what this rank writes, flat tensors on any device; over all ranks every element of every tensor exactly
            once. They are gone through several times (an iterator is kept as a list).
        record: JSON that goes into the manifest; global rank 0's counts.
        lock: checked before the checkpoint becomes visible, so that a run whose lock was taken over publishes nothing.

    Raises:
        StorageError: the file system of some rank refused (on every rank); earlier checkpoints are untouched.
        CheckpointError: the pieces do not make up whole tensors, or the record is not JSON.
    """
    directory = Path(directory)
    storage = storage or Storage()
    first = mesh.world.rank == 0
    log.line(f"saving checkpoint at iteration {step:7d} to {directory}")
    run = on_first(mesh, lambda: _check_request(step, record))
    if isinstance(pieces, Iterator):
        pieces = list(pieces)
    temporary = directory / f"{TEMPORARY_PREFIX}{folder_name(step)}-{run}"
    needs = together(mesh, lambda: _needed_bytes(pieces))
    on_first(mesh, lambda: _open_folder(directory, temporary, sum(needs), storage))
    try:
        entries = together(mesh, lambda: _write_own(temporary, mesh.world.rank, pieces, chunk_bytes, storage))
        on_first(mesh, lambda: _commit(temporary, step, run, record, chunk_bytes, entries, lock, storage))
    except Exception:
        if first:
            _remove(temporary, storage)
        raise
    if first:
        _write_hint(directory, step, run, storage)
    log.line(f"successfully saved checkpoint at iteration {step:7d} to {directory}")
    return directory / folder_name(step)


def load(path: Path, wanted: Wanted, mesh: ParallelMesh, *, storage: Storage | None = None) -> dict[str, Any]:
    """Reads this rank's wanted pieces from one checkpoint folder and returns its record; collective over the mesh.

    Every rank reads only the chunks that it needs. No `accept` is called on any rank before all ranks have verified all
    bytes they need.

    Raises:
        DamagedError: some rank found damage (on every rank); an older checkpoint may do.
        CheckpointError: the checkpoint does not hold what is wanted; an older one would not help.
        StorageError: the system refused for a reason that has nothing to do with the checkpoint.
    """
    path = Path(path)
    storage = storage or Storage()
    readers: list[CheckpointReader] = []
    manifests: list[Manifest] = []
    claimed: set[str] = set()

    def prepare() -> str:
        manifest = read_manifest(path, storage)
        if mesh.world.rank == 0:
            check_files(path, manifest, storage)
        listed = list(wanted)
        claimed.update(key.name for key, _ in listed)
        reader = CheckpointReader(path, manifest, listed, storage)
        reader.verify()
        readers.append(reader)
        manifests.append(manifest)
        return manifest.digest

    digests = together(mesh, prepare)
    if len(set(digests)) > 1:
        raise CheckpointError(f"the ranks see different checkpoints at {path}. All nodes must see the same directory.")
    _warn_of_unclaimed(path, manifests[0], claimed, mesh)

    def deliver() -> None:
        readers[0].deliver()

    together(mesh, deliver)
    log.line(f"successfully loaded checkpoint from {path.parent} at iteration {manifests[0].step}")
    return manifests[0].record


def read_record(path: Path) -> dict[str, Any]:
    """The record of one checkpoint folder; reads the manifest only, in one process.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    return read_manifest(Path(path)).record


def verify(path: Path) -> Manifest:
    """Reads a whole checkpoint folder in one process and compares every digest.

    Raises:
        DamagedError: something differs from the manifest.
    """
    manifest = read_manifest(Path(path))
    verify_files(Path(path), manifest, Storage())
    return manifest


def read_tensors(
    path: Path, names: list[str] | None = None, kind: Kind = "weight", *, storage: Storage | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Builds whole tensors in one process, for tools: one at a time, each verified before it is given out.

    Args:
        names: global parameter names; None means all, sorted.

    Raises:
        CheckpointError: a tensor is not in the checkpoint, or damaged.
    """
    path = Path(path)
    manifest = read_manifest(path, storage)
    catalogue = Catalogue.of(manifest.pieces)
    for name in catalogue.names() if names is None else names:
        shape = catalogue.shape(name)
        if shape is None:
            raise CheckpointError(f"tensor {name} is not in {path}. It holds: {', '.join(catalogue.names()[:20])}.")
        built: list[torch.Tensor] = []
        reader = CheckpointReader(path, manifest, [(whole(name, kind, shape), built.append)], storage)
        reader.verify()
        reader.deliver()
        yield name, built[0].reshape(shape)


def _check_request(step: int, record: Mapping[str, Any]) -> str:
    """Checks what can be checked before anything is written, and names the save: a number that no other save has."""
    if not 0 <= step < 10**18:
        raise CheckpointError(f"cannot save a checkpoint of step {step}; steps are counted from 0.")
    record_text(record)
    return secrets.token_hex(8)


def _needed_bytes(pieces: Pieces) -> int:
    return sum(key.numel * tensor.element_size() for key, tensor in pieces)


def _open_folder(directory: Path, temporary: Path, need_bytes: int, storage: Storage) -> None:
    try:
        storage.make_directories(directory)
        sweep(directory, storage)
        free = storage.free_bytes(directory)
        if free is not None and free < need_bytes:
            raise StorageError(
                f"no room for a checkpoint in {directory}: it needs {need_bytes} bytes, {free} bytes are free there. "
                "Earlier checkpoints are untouched. Free space there or give --save another directory."
            )
        storage.make_directory(temporary)
    except OSError as failure:
        raise cannot_write(storage, temporary, need_bytes, failure) from failure


def _write_own(temporary: Path, rank: int, pieces: Pieces, chunk_bytes: int, storage: Storage) -> list[Any] | None:
    """Writes this rank's file and describes it as JSON; None when the rank has nothing to write."""
    if not any(key.numel for key, _ in pieces):
        return None
    file, stored = write_pieces(temporary / file_name(rank), 0, pieces, chunk_bytes, storage)
    rows = [
        [key.name, key.kind, key.shape, key.start, key.stop, key.first, key.last, piece.dtype, piece.begin_bytes]
        for piece in stored
        for key in [piece.key]
    ]
    return [[file.name, file.size_bytes, file.sha256, file.chunks], rows]


def _commit(
    temporary: Path,
    step: int,
    run: str,
    record: Mapping[str, Any],
    chunk_bytes: int,
    entries: list[Any],
    lock: CheckpointLock | None,
    storage: Storage,
) -> None:
    """Checks that the ranks together wrote everything, writes the manifest, and makes the checkpoint visible."""
    files: list[StoredFile] = []
    pieces: list[StoredPiece] = []
    for (name, size_bytes, sha256, chunks), rows in filter(None, entries):
        pieces.extend(_stored(row, len(files)) for row in rows)
        files.append(StoredFile(name, size_bytes, sha256, tuple(chunks)))
    if not files:
        raise CheckpointError("no rank has anything to save: a checkpoint needs at least one tensor.")
    check_complete(piece.key for piece in pieces)
    content = manifest_bytes(step, run, record, chunk_bytes, files, pieces)
    if lock is not None:
        lock.check()
    final = temporary.parent / folder_name(step)
    target = temporary / MANIFEST_NAME
    try:
        write_file(storage, target, content)
        storage.sync_directory(temporary)
        target = final
        _publish(temporary, final, run, storage)
    except OSError as failure:
        raise cannot_write(storage, target, len(content), failure) from failure


def _stored(row: list[Any], file: int) -> StoredPiece:
    name, kind, shape, start, stop, first, last, dtype, begin = row
    key = PieceKey(name, as_kind(kind) or "weight", tuple(shape), tuple(start), tuple(stop), first, last)
    return StoredPiece(key, dtype, ITEM_BYTES[dtype], file, begin)


def _publish(temporary: Path, final: Path, run: str, storage: Storage) -> None:
    """Renames the folder to its final name; one of that name is moved aside first and moved back when that fails."""
    aside: Path | None = None
    if storage.exists(final):
        aside = final.with_name(f"{ASIDE_PREFIX}{final.name}-{run}")
        storage.rename(final, aside)
    try:
        storage.rename(temporary, final)
    except OSError:
        if aside is not None:
            storage.rename(aside, final)
        raise
    storage.sync_directory(final.parent)
    if aside is not None:
        _remove(aside, storage)


def _write_hint(directory: Path, step: int, run: str, storage: Storage) -> None:
    """Points upstream's tools at the newest checkpoint. Recovery does not need it, so a failure is only a warning."""
    temporary = directory / f"{TEMPORARY_PREFIX}latest-{run}"
    try:
        write_file(storage, temporary, str(step).encode())
        storage.rename(temporary, directory / HINT_NAME)
        storage.sync_directory(directory)
    except OSError as failure:
        log.warning(
            f"the checkpoint is saved, but {HINT_NAME} could not be updated: {failure}. Nothing of ours needs it."
        )
        _quietly(storage.remove_file, temporary)


def sweep(directory: Path, storage: Storage) -> None:
    """Removes what dead saves left behind, and puts back a checkpoint that one of them had moved aside."""
    for name in storage.names(directory):
        path = directory / name
        if name.startswith(TEMPORARY_PREFIX + "iter_"):
            log.warning(f"removing {path}, which an unfinished save left behind")
            _remove(path, storage)
        elif name.startswith(TEMPORARY_PREFIX + "latest-"):
            _quietly(storage.remove_file, path)
        elif name.startswith(ASIDE_PREFIX + "iter_"):
            _settle(path, storage)


def _settle(aside: Path, storage: Storage) -> None:
    step = folder_step(aside.name)
    if step is None:
        return
    final = aside.with_name(folder_name(step))
    if not storage.exists(final):
        log.warning(f"moving {aside} back to {final}: a save of the same step died while it replaced it")
        _quietly(lambda path: storage.rename(path, final), aside)
        return
    try:
        check_files(final, read_manifest(final, storage), storage)
    except (CheckpointError, StorageError):
        return  # the one in place is not good: keep both
    _remove(aside, storage)


def _remove(path: Path, storage: Storage) -> None:
    _quietly(storage.remove_tree, path)


def _quietly(work: Callable[[Path], None], path: Path) -> None:
    try:
        work(path)
    except OSError as failure:
        log.warning(f"could not clean up {path}: {failure}. It does no harm; remove it by hand if it stays.")


def _warn_of_unclaimed(path: Path, manifest: Manifest, claimed: set[str], mesh: ParallelMesh) -> None:
    """Says which stored tensors no rank wanted: a smaller model than the saved one would otherwise load in silence."""
    names = Catalogue.of(manifest.pieces).names()
    flags = torch.tensor([int(name in claimed) for name in names], dtype=torch.int32, device=mesh.device)
    left = [name for name, flag in zip(names, all_reduce_max(flags, mesh.world).tolist(), strict=True) if not flag]
    if left and mesh.world.rank == 0:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        log.warning(f"{path} holds tensors that this run's model does not have: {', '.join(left[:5])}{more}")
