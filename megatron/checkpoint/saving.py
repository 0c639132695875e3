"""Saves a checkpoint: every rank writes its own file, rank 0 the manifest, and one rename makes all of it visible.

Saving has two halves. `take_snapshot` lists what this rank saves; `write_snapshot` puts the values on the disk. If they
lie in a buffer of their own, the second half touches no tensor of the run, and training continues meanwhile.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.checkpoint.layout import StoredPiece, as_kind, check_complete
from megatron.checkpoint.lock import CheckpointLock
from megatron.checkpoint.manifest import (
    CHUNK_BYTES,
    ITEM_BYTES,
    MANIFEST_NAME,
    StoredFile,
    file_name,
    folder_name,
    manifest_bytes,
    record_text,
)
from megatron.checkpoint.publish import discard, open_temporary, publish, temporary_folder, write_hint
from megatron.checkpoint.snapshot import Pieces, Snapshot, take_snapshot
from megatron.checkpoint.storage import Storage, cannot_write, write_file
from megatron.checkpoint.writer import write_pieces
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.agreement import gather_on_first, run_on_all, run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_sum
from megatron.parallel.pieces import PieceKey

AfterCommit = Callable[[Path, ParallelMesh], None]


@dataclass(frozen=True)
class SaveLines:
    """The lines that a save prints, from its step and the folder of all checkpoints; upstream's by default.

    Attributes:
        before: when a save begins.
        after: when its checkpoint is committed.
    """

    before: Callable[[int, Path], str | None] = lambda step, directory: (
        f"saving checkpoint at iteration {step:7d} to {directory}"
    )
    after: Callable[[int, Path], str | None] = lambda step, directory: (
        f"successfully saved checkpoint at iteration {step:7d} to {directory}"
    )


MEGATRON_LINES = SaveLines()


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is saved.

    Attributes:
        lock: checked before the checkpoint becomes visible, so that a run whose lock was taken over publishes nothing.
        after_commit: called on every rank with the checkpoint's folder and the mesh. The checkpoint counts whatever
            becomes of it: its StorageError is a warning.
        beat: called before each part that this rank writes; it may raise to end the save.
        lines: what is printed.
        check_finite: refuse NaN and infinities.
        chunk_bytes: the files are hashed in parts of this size.
    """

    lock: CheckpointLock | None = None
    after_commit: AfterCommit | None = None
    beat: Callable[[], None] = lambda: None
    lines: SaveLines = MEGATRON_LINES
    check_finite: bool = True
    chunk_bytes: int = CHUNK_BYTES
    storage: Storage = field(default_factory=Storage)


def save(
    directory: Path,
    step: int,
    pieces: Pieces,
    record: Mapping[str, Any],
    mesh: ParallelMesh,
    options: SaveOptions | None = None,
) -> Path:
    """Takes a snapshot and writes it at once, in constant memory; collective over the whole mesh.

    Args:
        pieces: what this rank writes, flat tensors on any device; over all ranks every element of every tensor exactly
            once.

    Raises:
        as `write_snapshot`, and CheckpointError: a tensor does not fit its key.
    """
    return write_snapshot(directory, step, run_on_all(mesh, lambda: take_snapshot(pieces)), record, mesh, options)


def write_snapshot(
    directory: Path,
    step: int,
    taken: Snapshot,
    record: Mapping[str, Any],
    mesh: ParallelMesh,
    options: SaveOptions | None = None,
) -> Path:
    """Writes a snapshot of every rank to `directory/iter_{step:07d}`; collective over the whole mesh.

    Args:
        record: JSON that goes into the manifest; global rank 0's counts.

    Raises:
        NumericsError: a value of some rank is NaN or infinite.
        StorageError: the file system of some rank refused (on every rank); earlier checkpoints are untouched.
        CheckpointError: the pieces do not make up whole tensors, or the record is not JSON.
    """
    options = options or SaveOptions()
    storage = options.storage
    first = mesh.control.rank == 0
    _show(options.lines.before(step, directory))
    run = run_on_first(mesh, lambda: _check_request(step, record))
    temporary = temporary_folder(directory, step, run)
    need_bytes = int(all_reduce_sum(torch.tensor([taken.size_bytes], dtype=torch.int64), mesh.control))
    run_on_first(mesh, lambda: open_temporary(temporary, need_bytes, storage))
    try:
        entries = gather_on_first(mesh, lambda: _write_own(temporary, taken, options, mesh) if taken.listed else None)
        run_on_first(mesh, lambda: _commit(temporary, step, run, record, entries or [], options))
    except Exception:
        if first:
            discard(temporary, storage)
        raise
    if first:
        write_hint(directory, step, run, storage)
    _show(options.lines.after(step, directory))
    final = directory / folder_name(step)
    _call_after_commit(options.after_commit, final, mesh)
    return final


def _show(text: str | None) -> None:
    if text is not None:
        log.line(text)


def _call_after_commit(work: AfterCommit | None, final: Path, mesh: ParallelMesh) -> None:
    try:
        if work is not None:
            run_on_all(mesh, functools.partial(work, final, mesh))
    except StorageError as failure:
        if mesh.control.rank == 0:
            log.warning(f"{final} is saved, but what follows a save failed: {failure}")


def _check_request(step: int, record: Mapping[str, Any]) -> str:
    """Checks what can be checked before anything is written, and names the save: a number that no other save has."""
    if not 0 <= step < 10**18:
        raise CheckpointError(f"cannot save a checkpoint of step {step}; steps are counted from 0.")
    record_text(record)
    return secrets.token_hex(8)


def _write_own(temporary: Path, taken: Snapshot, options: SaveOptions, mesh: ParallelMesh) -> list[Any]:
    """Writes this rank's file; the file and its pieces as JSON."""
    file, stored = write_pieces(
        temporary / file_name(mesh.control.rank),
        taken,
        options.chunk_bytes,
        options.storage,
        beat=options.beat,
        check_finite=options.check_finite,
    )
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
    entries: Sequence[Any],
    options: SaveOptions,
) -> None:
    """Checks that all ranks together wrote everything, writes the manifest, and makes the checkpoint visible."""
    files: list[StoredFile] = []
    pieces: list[StoredPiece] = []
    for (name, size_bytes, sha256, chunks), rows in filter(None, entries):
        pieces.extend(_stored(row, len(files)) for row in rows)
        files.append(StoredFile(name, size_bytes, sha256, tuple(chunks)))
    if not files:
        raise CheckpointError("no rank has anything to save: a checkpoint needs at least one tensor.")
    check_complete(piece.key for piece in pieces)
    content = manifest_bytes(step, run, record, options.chunk_bytes, files, pieces)
    if options.lock is not None:
        options.lock.check()
    storage = options.storage
    final = temporary.parent / folder_name(step)
    target = temporary / MANIFEST_NAME
    try:
        write_file(storage, target, content)
        storage.sync_directory(temporary)
        target = final
        publish(temporary, final, run, storage)
    except OSError as failure:
        raise cannot_write(storage, target, len(content), failure) from failure


def _stored(row: Sequence[Any], file: int) -> StoredPiece:
    """A piece as `_write_own` gave it."""
    name, kind, shape, start, stop, first, last, dtype, begin_bytes = row
    key = PieceKey(name, as_kind(kind) or "weight", tuple(shape), tuple(start), tuple(stop), first, last)
    return StoredPiece(key, dtype, ITEM_BYTES[dtype], file, begin_bytes)
