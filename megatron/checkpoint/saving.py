"""Saves a checkpoint: each rank writes its own file, rank 0 writes the manifest, and one rename publishes the folder.

`take_snapshot` lists the pieces of a rank; `write_snapshot` writes their values to disk. If the values are in a
separate buffer, training continues meanwhile.

A rank streams its values into a safetensors file. The bytes are checked and hashed in memory; tensors are copied to the
host chunk by chunk, never as a whole. Values that are not finite are refused: no run could resume from them, and the
checkpoint would replace one that is valid.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from megatron import log
from megatron.checkpoint.catalogue import ITEM_BYTES, StoredPiece
from megatron.checkpoint.layout import check_complete
from megatron.checkpoint.lock import CheckpointLock
from megatron.checkpoint.manifest import MANIFEST_NAME, file_name, folder_name, read_manifest
from megatron.checkpoint.manifests.compaction import FileDescription, compact, describe
from megatron.checkpoint.manifests.contents import StoredFile
from megatron.checkpoint.manifests.writing import FORMAT, FORMAT_VERSION, manifest_texts, record_text
from megatron.checkpoint.publish import discard, open_temporary, publish, temporary_folder, write_hint
from megatron.checkpoint.snapshot import Pieces, Snapshot, piece_name, take_snapshot
from megatron.checkpoint.storage import Storage, append, cannot_write, write_file, writing
from megatron.errors import CheckpointError, NumericsError, StorageError
from megatron.parallel.agreement import gather_on_first, run_on_all, run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_sum, broadcast_bytes
from megatron.parallel.pieces import PieceKey

# Longer buffers are hashed by threads while this one writes (hashing releases the GIL).
_THREADED_HASH_BYTES = 256 * 2**10
# The square of this, and so any norm that includes it, is infinite in float32.
_LEAST_UNUSABLE = 2.0**64

CHUNK_BYTES = 16 * 2**20

AfterCommit = Callable[[Path, ParallelMesh], None]


@dataclass(frozen=True)
class SaveLines:
    """The lines printed by a save, given its step and the folder of all checkpoints; upstream's by default.

    Attributes:
        before: when a save starts.
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
    """Options of a save.

    Attributes:
        lock: checked before the checkpoint is published, so that a run that has lost its lock publishes nothing.
        after_commit: called on every rank with the checkpoint's folder and the mesh; a StorageError is a warning.
        beat: called before each part that this rank writes; may raise to abort the save.
        lines: the lines to print.
        check_finite: refuse NaN and infinities.
        chunk_bytes: the files are hashed in chunks of this size.
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
    """Takes a snapshot and writes it, in constant memory; collective over the whole mesh.

    Args:
        pieces: flat tensors on any device; together the ranks must have every element of every tensor exactly once.

    Raises:
        see `write_snapshot`; CheckpointError: a tensor does not match its key.
    """
    return write_snapshot(directory, step, run_on_all(mesh, lambda: take_snapshot(pieces)), record, mesh, options)


def write_snapshot(
    directory: Path,
    step: int,
    snapshot: Snapshot,
    record: Mapping[str, Any],
    mesh: ParallelMesh,
    options: SaveOptions | None = None,
) -> Path:
    """Writes the snapshots of all ranks to `directory/iter_{step:07d}`; collective over the whole mesh.

    Args:
        record: JSON for the manifest; only global rank 0's is used.

    Raises:
        NumericsError: a value on some rank is NaN or infinite.
        StorageError: the file system of some rank refused (raised on every rank); earlier checkpoints are intact.
        CheckpointError: the pieces do not cover whole tensors, or the record is not JSON.
    """
    options = options or SaveOptions()
    storage = options.storage
    first = mesh.control.rank == 0
    _show(options.lines.before(step, directory))
    run = run_on_first(mesh, lambda: _check_request(step, record))
    temporary = temporary_folder(directory, step, run)
    need_bytes = int(all_reduce_sum(torch.tensor([snapshot.size_bytes], dtype=torch.int64), mesh.control))
    if options.lock is not None:
        run_on_first(mesh, options.lock.check)
    run_on_first(mesh, lambda: open_temporary(temporary, need_bytes, storage))
    try:
        write = functools.partial(_write_file, temporary, snapshot, options, mesh)
        written = _gather_files(mesh, lambda: write() if snapshot.listed else None)
        run_on_first(mesh, lambda: _commit(temporary, step, run, record, written, options))
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
            log.warning(f"{final} is saved, but a post-save action failed: {failure}")


def _check_request(step: int, record: Mapping[str, Any]) -> str:
    """Checks the arguments before anything is written, and returns a unique name of the save."""
    if not 0 <= step < 10**18:
        raise CheckpointError(f"cannot save a checkpoint of step {step}; steps are counted from 0.")
    record_text(record)
    return secrets.token_hex(8)


def _write_file(
    temporary: Path, snapshot: Snapshot, options: SaveOptions, mesh: ParallelMesh
) -> tuple[StoredFile, FileDescription]:
    """Writes this rank's file; returns its entries for the manifest."""
    file, stored = write_pieces(
        temporary / file_name(mesh.control.rank),
        snapshot,
        options.chunk_bytes,
        options.storage,
        beat=options.beat,
        check_finite=options.check_finite,
    )
    return file, describe(stored)


@dataclass(frozen=True)
class _WrittenFiles:
    """The files of all ranks; on rank 0 only.

    Attributes:
        numbers, rows_of, rows: the arguments of `compact`.
    """

    files: list[StoredFile]
    numbers: list[list[int]]
    rows_of: list[str]
    rows: dict[str, list[Any]]


def _gather_files(mesh: ParallelMesh, work: Callable[[], tuple[StoredFile, FileDescription] | None]) -> _WrittenFiles:
    """Runs `work` on every rank and gathers the results; of ranks with equal descriptions, one sends its rows."""
    local: list[FileDescription] = []

    def entry() -> list[Any] | None:
        result = work()
        if result is None:
            return None
        file, description = result
        local.append(description)
        return [[file.name, file.size_bytes, file.sha256, file.chunks], description.numbers, description.digest]

    entries = gather_on_first(mesh, entry) or []
    senders: dict[str, int] = {}
    for rank, line in enumerate(entries):
        if line is not None:
            senders.setdefault(line[2], rank)
    mask = bytearray((mesh.control.size + 7) // 8)  # one bit per rank
    for rank in senders.values():
        mask[rank // 8] |= 1 << rank % 8
    this = mesh.control.rank
    is_sender = broadcast_bytes(bytes(mask), mesh.control)[this // 8] >> this % 8 & 1
    rows = gather_on_first(mesh, lambda: local[0].rows if is_sender else None) or []
    lines = [line for line in entries if line is not None]
    return _WrittenFiles(
        [StoredFile(name, size_bytes, sha256, tuple(chunks)) for (name, size_bytes, sha256, chunks), _, _ in lines],
        [numbers for _, numbers, _ in lines],
        [digest for _, _, digest in lines],
        {digest: rows[rank] for digest, rank in senders.items()},
    )


def _commit(
    temporary: Path,
    step: int,
    run: str,
    record: Mapping[str, Any],
    written: _WrittenFiles,
    options: SaveOptions,
) -> None:
    """Checks that the pieces of all ranks are complete, writes the manifest, and publishes the checkpoint."""
    if not written.files:
        raise CheckpointError("no rank has anything to save: a checkpoint must have at least one tensor.")
    runs = compact(written.numbers, written.rows_of, written.rows)
    check_complete(run.key for run in runs)
    root, indexes = manifest_texts(step, run, record, options.chunk_bytes, written.files, runs)
    if options.lock is not None:
        options.lock.check()
    storage = options.storage
    final = temporary.parent / folder_name(step)
    target = temporary / MANIFEST_NAME
    size_bytes = len(root) + sum(map(len, indexes.values()))
    try:
        for name, text in {**indexes, MANIFEST_NAME: root}.items():
            target = temporary / name
            write_file(storage, target, text)
        storage.sync_directory(temporary)
        _read_back(temporary, written, storage)
        target = final
        publish(temporary, final, run, storage)
    except OSError as failure:
        raise cannot_write(storage, target, size_bytes, failure) from failure


def _read_back(temporary: Path, written: _WrittenFiles, storage: Storage) -> None:
    """Reads the manifest back as a load would, before the checkpoint replaces an older one.

    Raises:
        CheckpointError: it is invalid, or differs from what the ranks wrote.
        StorageError: the system refused to read it, for a reason unrelated to the file.
    """
    try:
        manifest = read_manifest(temporary, storage)
        files = list(manifest.files)
    except CheckpointError as failure:
        raise _not_published(str(failure)) from failure
    if files != written.files:
        raise _not_published("its files differ from those written.")
    last = {digest: file for file, digest in enumerate(written.rows_of)}
    first = {digest: file for file, digest in reversed(list(enumerate(written.rows_of)))}
    for file in sorted({*first.values(), *last.values()}):  # files in between belong to the same runs
        keys = FileDescription(tuple(written.numbers[file]), tuple(written.rows[written.rows_of[file]])).keys()
        if [piece.key for piece in manifest.catalogue.pieces_of(file)] != keys:
            raise _not_published(f"its pieces in {files[file].name} differ from those written.")


def _not_published(problem: str) -> CheckpointError:
    return CheckpointError(
        f"the new manifest cannot be read back: {problem} Nothing was saved, and earlier checkpoints are intact. Save "
        "again; if the error persists, report it with this message."
    )


def write_pieces(
    path: Path,
    snapshot: Snapshot,
    chunk_bytes: int,
    storage: Storage,
    *,
    beat: Callable[[], None] = lambda: None,
    check_finite: bool = True,
) -> tuple[StoredFile, list[StoredPiece]]:
    """Writes and syncs a new file; returns the manifest's entries for it and its pieces.

    The pieces have file number 0; the manifest numbers the files later.

    Args:
        beat: called before each part is written; may raise to abort.
        check_finite: refuse NaN and infinities.

    Raises:
        CheckpointError: the pieces changed since the snapshot was taken.
        NumericsError: a value, or its square, is NaN or infinite.
        StorageError: the file system refused.
    """
    listed = sorted(snapshot.listed, key=lambda entry: -ITEM_BYTES[entry[1]])
    metadata = {"format": FORMAT, "format_version": str(FORMAT_VERSION)}
    header, offsets = safetensors_header(metadata, [(piece_name(key), dtype, [key.numel]) for key, dtype in listed])
    stored = [
        StoredPiece(key, dtype, ITEM_BYTES[dtype], 0, offset)
        for (key, dtype), offset in zip(listed, offsets, strict=True)
    ]
    size_bytes = max(piece.end_bytes for piece in stored) if stored else len(header)
    with writing(storage, path, size_bytes) as handle, _HashingFile(storage, handle, chunk_bytes) as file:
        file.write(memoryview(header))
        for key, dtype, tensor in snapshot.tensors():
            for part, first in _parts(tensor, file, ITEM_BYTES[dtype]):
                beat()
                if check_finite:
                    _check_finite(key, part, first)
                file.write(part.view(torch.uint8).numpy().data)
        sha256, chunks = file.digests()
    return StoredFile(path.name, size_bytes, sha256, chunks), stored


def safetensors_header(
    metadata: Mapping[str, str], tensors: Iterable[tuple[str, str, Sequence[int]]]
) -> tuple[bytes, list[int]]:
    """The first bytes of a file (length, header), and the byte offset of each tensor in it.

    Args:
        tensors: name, element type and shape, in file order; wider element types first, for alignment.

    Source: safetensors README, "Format": 8 bytes little-endian header length, JSON header, the tensors without holes.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets, offset = [], 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offsets.append(offset)
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the widest element type aligned
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + offset for offset in offsets]


def _parts(tensor: torch.Tensor, file: _HashingFile, item_bytes: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Copies a flat tensor to the host in parts that fit into a chunk of the file; yields them with their offsets."""
    flat = tensor.detach()
    done = 0
    while done < flat.numel():
        count = max(1, file.room_bytes() // item_bytes)
        part = flat[done : done + count].to("cpu")
        if part.stride(0) != 1:  # even a single element can have another stride, which prevents a view as bytes
            part = torch.empty(part.shape, dtype=part.dtype).copy_(part)
        yield part, done
        done += part.numel()


def _check_finite(key: PieceKey, part: torch.Tensor, first: int) -> None:
    """Refuses NaN, infinities and values whose square is infinite; `first` is the index of the part in the piece."""
    if not part.is_floating_point():
        return
    # NumPy, which needs fewer passes than torch and a single thread.
    if part.dtype == torch.bfloat16:  # not supported by NumPy: test for an exponent of 2^64 or above, NaN included
        wrong = (part.view(torch.int16).numpy() & 0x7F80) >= 0x5F80
    elif part.dtype == torch.float16:
        wrong = ~np.isfinite(part.numpy())
    else:
        wrong = ~(np.abs(part.numpy()) < _LEAST_UNUSABLE)
    if wrong.any():
        index = int(wrong.argmax())
        raise NumericsError(
            f"tensor {key.name} ({key.kind}) has the value {float(part[index])} at element {first + index} of piece "
            f"{piece_name(key)}. Nothing was saved: no run can continue from values that are not finite or reach 2^64, "
            "where squares overflow. Earlier checkpoints are intact. Resume from the last one with a lower --lr, a "
            "longer warm-up or --skip-train-iteration-range."
        )


@final
class _HashingFile:
    """Writes a file, and computes the SHA-256 of the whole file and of each chunk from memory."""

    def __init__(self, storage: Storage, handle: int, chunk_bytes: int) -> None:
        self._storage = storage
        self._handle = handle
        self._chunk_bytes = chunk_bytes
        self._whole = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._filled = 0
        self._chunks: list[str] = []
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="checkpoint-hash")

    def __enter__(self) -> _HashingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def room_bytes(self) -> int:
        """The bytes left in the current chunk."""
        return self._chunk_bytes - self._filled

    def write(self, content: memoryview) -> None:
        while len(content):
            part = content[: self.room_bytes()]
            self._hash_and_write(part)
            self._filled += len(part)
            content = content[len(part) :]
            if self._filled == self._chunk_bytes:
                self._close_chunk()

    def digests(self) -> tuple[str, tuple[str, ...]]:
        """The digests of the file and of its chunks, after the last write."""
        if self._filled:
            self._close_chunk()
        return self._whole.hexdigest(), tuple(self._chunks)

    def _hash_and_write(self, part: memoryview) -> None:
        if len(part) < _THREADED_HASH_BYTES:
            self._whole.update(part)
            self._chunk.update(part)
            append(self._storage, self._handle, part)
            return
        work: list[Future[None]] = [
            self._threads.submit(self._whole.update, part),
            self._threads.submit(self._chunk.update, part),
        ]
        try:
            append(self._storage, self._handle, part)
        finally:  # the caller may change the memory as soon as this returns
            for future in work:
                future.result()

    def _close_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk = hashlib.sha256()
        self._filled = 0
