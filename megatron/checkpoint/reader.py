"""Reads pieces from checkpoint files: verifies every needed chunk first, then copies.

With two passes no tensor is modified on any rank before all bytes that all ranks need are verified, and at most one
piece and one chunk are in memory. The first pass stores a checksum of each span; the second compares it, which detects
bytes that change in between.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import final

import numpy as np
import torch

from megatron.checkpoint.catalogue import StoredPiece
from megatron.checkpoint.checks import LENGTH_BYTES, HeaderEntry, first_not_finite, header_problem, longest_header_bytes
from megatron.checkpoint.layout import Copies, Integers, plan_piece, whole
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.manifests.contents import Manifest, StoredFile
from megatron.checkpoint.manifests.reading import read_index
from megatron.checkpoint.snapshot import TORCH_TYPES, piece_name
from megatron.checkpoint.storage import DISK, Storage, read_range, unreadable
from megatron.errors import CheckpointError, DamagedError
from megatron.parallel.pieces import Kind, PieceKey

Accept = Callable[[torch.Tensor], None]
PieceRequests = Iterable[tuple[PieceKey, Accept]]

_OPEN_FILES = 32


@dataclass
class _Span:
    """A byte range within one chunk of a file, with the copies from it into one requested piece (all in bytes)."""

    stored: StoredPiece
    file: int
    chunk: int
    low: int
    high: int
    source: Integers  # from `low`
    destination: Integers
    length: Integers
    checksum: int = 0


@dataclass
class _Request:
    """A requested piece and the spans to read for it."""

    key: PieceKey
    accept: Accept
    dtype: torch.dtype
    spans: list[_Span] = field(default_factory=list)

    @property
    def position(self) -> tuple[int, int]:
        """File and offset of the first span; pieces are read in this order, so that files are read forward."""
        return (self.spans[0].file, self.spans[0].low) if self.spans else (-1, 0)


class CheckpointReader:
    """Reads the pieces that one rank needs of a checkpoint: `verify()` first, then `deliver()`.

    Args:
        requests: pieces, each with an `accept` function, which receives a flat CPU tensor in the stored element type
            (fp32 for master weights and moments). The calls are made in the order of the files.
        finite: treat NaN and infinite values as damage, since no run can continue from them.

    Raises:
        CheckpointError: a requested piece is not stored.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        requests: PieceRequests,
        storage: Storage = DISK,
        *,
        finite: bool = True,
    ) -> None:
        self._folder = folder
        self._finite = finite
        self._manifest = manifest
        self._storage = storage
        self._requests = [
            self._plan(key, accept)
            for key, accept in requests
            if not key.is_optional or manifest.catalogue.kinds(key.name)
        ]
        self._requests.sort(key=lambda piece: piece.position)

    def needed_chunks(self) -> dict[tuple[int, int], list[_Span]]:
        """The chunks to read, in file order: (file number, chunk number) -> spans in the chunk."""
        chunks: dict[tuple[int, int], list[_Span]] = {}
        for piece in self._requests:
            for span in piece.spans:
                chunks.setdefault((span.file, span.chunk), []).append(span)
        return dict(sorted(chunks.items()))

    def verify(self) -> None:
        """Reads every needed chunk once and compares its digest; modifies no tensor.

        Raises:
            DamagedError: a file is missing or has another size, a chunk has another digest, or a value is not finite;
                names file, bytes and tensor.
        """
        size = self._manifest.chunk_bytes
        needed = self.needed_chunks()
        largest = max((min(size, self._file(file).size_bytes - chunk * size) for file, chunk in needed), default=0)
        buffer = memoryview(bytearray(largest))
        with _OpenFiles(self._folder, self._manifest.files, self._storage) as files:
            for (file, chunk), spans in needed.items():
                stored = self._file(file)
                start = chunk * size
                content = buffer[: min(size, stored.size_bytes - start)]
                files.read(file, content, start)
                if hashlib.sha256(content).hexdigest() != stored.chunks[chunk]:
                    raise DamagedError(
                        f"{self._folder / stored.name} is damaged between bytes {start} and {start + len(content)} "
                        f"(tensor {spans[0].stored.key.name}): the digest differs from the manifest. "
                        "Use another checkpoint."
                    )
                for span in spans:
                    span.checksum = zlib.crc32(content[span.low - start : span.high - start])
                    if self._finite:
                        self._check_finite(span, content, start)

    def deliver(self) -> None:
        """Reads each requested piece and passes it to its `accept`; call `verify()` first.

        Raises:
            DamagedError: the bytes changed since `verify()`; tensors may be partially loaded.
        """
        with _OpenFiles(self._folder, self._manifest.files, self._storage) as files:
            for piece in self._requests:
                piece.accept(self._assemble(files, piece))  # no reference is kept: one piece at a time is in memory

    def _check_finite(self, span: _Span, content: memoryview, start: int) -> None:
        """Checks the complete elements in a span of a chunk that starts at byte `start`."""
        stored = span.stored
        low = span.low + (stored.begin_bytes - span.low) % stored.item_bytes
        high = span.high - (span.high - stored.begin_bytes) % stored.item_bytes
        index = first_not_finite(content[low - start : max(low, high) - start], stored.dtype)
        if index is not None:
            raise DamagedError(
                f"{self._folder / self._file(span.file).name} has a value that is not finite at byte "
                f"{low + index * stored.item_bytes}, in tensor {stored.key.name} ({stored.key.kind}): the run that "
                "saved it had diverged. Use an older checkpoint."
            )

    def _assemble(self, files: _OpenFiles, piece: _Request) -> torch.Tensor:
        values = torch.empty(piece.key.numel, dtype=piece.dtype)
        target = values.view(torch.uint8).numpy().data if piece.key.numel else memoryview(b"")
        for span in piece.spans:
            self._copy(files, span, target, piece.key.name)
        return values if piece.key.kind == "weight" else values.to(torch.float32)

    def _copy(self, files: _OpenFiles, span: _Span, target: memoryview, name: str) -> None:
        direct = span.length.size == 1  # a single copy: read it directly into the target
        first = int(span.destination[0])
        content = (
            target[first : first + span.high - span.low] if direct else memoryview(bytearray(span.high - span.low))
        )
        files.read(span.file, content, span.low)
        if zlib.crc32(content) != span.checksum:
            raise DamagedError(
                f"{self._folder / self._file(span.file).name} changed between bytes {span.low} and {span.high} (tensor "
                f"{name}) while it was read. Tensors may be partially loaded; load another checkpoint."
            )
        if not direct:
            for source, destination, length in zip(
                span.source.tolist(), span.destination.tolist(), span.length.tolist(), strict=True
            ):
                target[destination : destination + length] = content[source : source + length]

    def _plan(self, key: PieceKey, accept: Accept) -> _Request:
        if key.numel == 0:
            return _Request(key, accept, torch.float32)
        parts = plan_piece(key, self._manifest.catalogue)
        piece = _Request(key, accept, TORCH_TYPES[parts[0][0].dtype])
        for stored, copies in parts:
            piece.spans.extend(_spans(stored, copies, self._manifest.chunk_bytes))
        piece.spans.sort(key=lambda span: (span.file, span.low))
        return piece

    def _file(self, number: int) -> StoredFile:
        return self._manifest.files[number]


def _spans(stored: StoredPiece, copies: Copies, chunk_bytes: int) -> Iterator[_Span]:
    """Splits copies at chunk boundaries; copies are in file order, so that each chunk takes consecutive ones."""
    low = stored.begin_bytes + copies.source * stored.item_bytes
    high = low + copies.length * stored.item_bytes
    destination = copies.destination * stored.item_bytes
    chunk = int(low[0]) // chunk_bytes
    while True:
        boundary = (chunk + 1) * chunk_bytes
        start = int(np.searchsorted(high, boundary - chunk_bytes, side="right"))
        end = int(np.searchsorted(low, boundary, side="left"))
        part_low = np.maximum(low[start:end], boundary - chunk_bytes)
        part_high = np.minimum(high[start:end], boundary)
        base = int(part_low[0])
        yield _Span(
            stored,
            stored.file,
            chunk,
            base,
            int(part_high[-1]),
            part_low - base,
            destination[start:end] + part_low - low[start:end],
            part_high - part_low,
        )
        if int(high[-1]) <= boundary:
            return
        following = end - 1 if int(high[end - 1]) > boundary else end
        chunk = max(int(low[following]), boundary) // chunk_bytes


@final
class _OpenFiles:
    """A cache of open files; checks the size of each file when it is opened."""

    def __init__(self, folder: Path, files: Sequence[StoredFile], storage: Storage) -> None:
        self._folder = folder
        self._files = files
        self._storage = storage
        self._handles: dict[int, int] = {}

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles.values():
            self._storage.close(handle)

    def read(self, number: int, target: memoryview, offset_bytes: int) -> None:
        """Fills `target` with the bytes of a file from an offset."""
        path = self._folder / self._files[number].name
        try:
            handle = self._handles.get(number)
            if handle is None:
                handle = self._open(number, path)
            read_range(self._storage, handle, target, offset_bytes)
        except OSError as failure:
            raise unreadable(path, failure) from failure

    def _open(self, number: int, path: Path) -> int:
        if len(self._handles) >= _OPEN_FILES:
            oldest = next(iter(self._handles))
            self._storage.close(self._handles.pop(oldest))
        handle, size_bytes = self._storage.open_to_read(path)
        self._handles[number] = handle
        if size_bytes != self._files[number].size_bytes:
            raise DamagedError(
                f"{path} has {size_bytes} bytes; its manifest expects {self._files[number].size_bytes}. "
                "Use another checkpoint."
            )
        return handle


def check_files(folder: Path, manifest: Manifest, storage: Storage, rank: int = 0, ranks: int = 1) -> None:
    """Checks size and safetensors header of every file of a checkpoint, without reading its data.

    Args:
        rank, ranks: checks this rank's share of the files.

    Raises:
        DamagedError: a file is missing, not a regular file, has another size, or its header differs from the manifest.
    """
    for index in manifest.indexes[rank::ranks]:
        read_index(folder, index, storage)
    with _OpenFiles(folder, manifest.files, storage) as files:
        count = len(manifest.files)
        for number in range(count * rank // ranks, count * (rank + 1) // ranks):  # adjacent: they share index files
            stored = manifest.files[number]
            entries = {
                piece_name(piece.key): HeaderEntry(piece.dtype, piece.key.numel, piece.begin_bytes, piece.end_bytes)
                for piece in manifest.catalogue.pieces_of(number)
            }
            length = memoryview(bytearray(LENGTH_BYTES))
            files.read(number, length, 0)
            header_bytes = int.from_bytes(length, "little")
            expected = min(entry.begin_bytes for entry in entries.values()) - LENGTH_BYTES
            problem: str | None = f"its header has {header_bytes} bytes; the manifest expects {expected}"
            if header_bytes == expected <= longest_header_bytes(entries):
                header = bytearray(header_bytes)
                files.read(number, memoryview(header), LENGTH_BYTES)
                problem = header_problem(header, entries)
            if problem is not None:
                raise DamagedError(f"{folder / stored.name} is damaged: {problem}. Use another checkpoint.")


def verified_chunks(folder: Path, manifest: Manifest, number: int, storage: Storage) -> Iterator[memoryview]:
    """Reads one file of a checkpoint and yields its verified chunks; each chunk reuses the memory of the previous one.

    Args:
        number: the file's number in the manifest.

    Raises:
        DamagedError: the file is missing or has another size, or a chunk has another digest.
    """
    stored, size = manifest.files[number], manifest.chunk_bytes
    buffer = memoryview(bytearray(min(size, stored.size_bytes)))
    with _OpenFiles(folder, manifest.files, storage) as files:
        for chunk, digest in enumerate(stored.chunks):
            content = buffer[: min(size, stored.size_bytes - chunk * size)]
            files.read(number, content, chunk * size)
            if hashlib.sha256(content).hexdigest() != digest:
                raise DamagedError(
                    f"{folder / stored.name} is damaged between bytes {chunk * size} and "
                    f"{chunk * size + len(content)}: the digest differs from the manifest. Use another checkpoint."
                )
            yield content


def verify(folder: Path, storage: Storage = DISK) -> Manifest:
    """Reads every byte of a checkpoint folder and compares all digests, of chunks and of files.

    Raises:
        DamagedError: something differs from the manifest.
    """
    manifest = read_manifest(folder, storage)
    check_files(folder, manifest, storage)
    for number, stored in enumerate(manifest.files):
        whole_file = hashlib.sha256()
        for content in verified_chunks(folder, manifest, number, storage):
            whole_file.update(content)
        if whole_file.hexdigest() != stored.sha256:
            raise DamagedError(
                f"{folder / stored.name} does not match the digest in its manifest. Use another checkpoint."
            )
    return manifest


def read_pieces(
    folder: Path,
    manifest: Manifest,
    keys: Sequence[PieceKey],
    *,
    storage: Storage = DISK,
    finite: bool = True,
) -> list[torch.Tensor]:
    """The verified values of pieces, all in memory at once; for arguments see `CheckpointReader`.

    Shapes: flat, `[numel]` each, in the stored element type.

    Raises:
        CheckpointError: a piece is not stored, or has another shape.
        DamagedError: the bytes differ from those that were written.
    """
    values: dict[int, torch.Tensor] = {}
    requests = [(key, functools.partial(values.__setitem__, index)) for index, key in enumerate(keys)]
    reader = CheckpointReader(folder, manifest, requests, storage, finite=finite)
    reader.verify()
    reader.deliver()
    return [values[index] for index in range(len(keys))]


def read_tensors(
    path: Path,
    names: Sequence[str] | None = None,
    kind: Kind = "weight",
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    storage: Storage = DISK,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole, verified tensors of a checkpoint folder, one at a time.

    Args:
        names: global parameter names; None for all, sorted.
        shapes: requested shapes that differ from the stored ones: adjacent dimensions of one may be merged in the
            other.

    Raises:
        CheckpointError: a tensor is not in the checkpoint, cannot have the requested shape, or is damaged.
    """
    manifest = read_manifest(path, storage)
    check_files(path, manifest, storage)
    catalogue = manifest.catalogue
    for name in catalogue.names() if names is None else names:
        stored_shape = catalogue.shape(name)
        if stored_shape is None:
            raise CheckpointError(f"tensor {name} is not in {path}. It has: {', '.join(catalogue.names()[:20])}.")
        shape = (shapes or {}).get(name, stored_shape)
        (values,) = read_pieces(path, manifest, [whole(name, kind, shape)], storage=storage)
        yield name, values.reshape(shape)
