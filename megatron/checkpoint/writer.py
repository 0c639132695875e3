"""Streams one rank's pieces into a safetensors file, hashing on the way out of memory.

The header needs only keys and element types, so the pieces are gone through once for it and again for the bytes; no
tensor is copied whole, and one on another device crosses in chunks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import torch

from megatron.checkpoint.layout import StoredPiece, key_problem
from megatron.checkpoint.manifest import FORMAT, FORMAT_VERSION, ITEM_BYTES, StoredFile
from megatron.checkpoint.storage import Storage, cannot_write, write_all
from megatron.errors import CheckpointError
from megatron.parallel.pieces import PieceKey

Pieces = Iterable[tuple[PieceKey, torch.Tensor]]

# safetensors name -> torch element type.
TORCH_TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}

_NAMES = {dtype: name for name, dtype in TORCH_TYPES.items()}
# Shorter buffers are hashed at once; for longer ones threads hash while this one writes (hashing frees Python).
_WORTH_A_THREAD_BYTES = 256 * 2**10


def write_pieces(
    path: Path, number: int, pieces: Pieces, chunk_bytes: int, storage: Storage
) -> tuple[StoredFile, list[StoredPiece]]:
    """Writes a new file and waits until it is on the disk.

    Args:
        number: the file's number in the manifest.
        pieces: 1-D tensors; gone through more than once, so an iterator is kept as a list.

    Raises:
        CheckpointError: a tensor does not fit its key, or the pieces changed between the passes.
        StorageError: the file system refused.
    """
    if isinstance(pieces, Iterator):
        pieces = list(pieces)
    header, stored = _lay_out(number, pieces)
    size_bytes = max(piece.end_bytes for piece in stored) if stored else len(header)
    try:
        handle = storage.create(path)
        try:
            with _HashingFile(storage, handle, chunk_bytes) as file:
                file.write(memoryview(header))
                _write_tensors(file, stored, _in_order(pieces))
                sha256, chunks = file.digests()
            storage.sync(handle)
        finally:
            storage.close(handle)
    except OSError as failure:
        raise cannot_write(storage, path, size_bytes, failure) from failure
    return StoredFile(path.name, size_bytes, sha256, chunks), stored


def _lay_out(number: int, pieces: Pieces) -> tuple[bytes, list[StoredPiece]]:
    """The file's first bytes (length, header) and the place of every piece.

    Source: safetensors README, "Format": 8 bytes little-endian header length, JSON header, the tensors without holes.
    """
    listed = [(key, dtype) for key, dtype, _ in _typed(pieces)]
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "format_version": str(FORMAT_VERSION)}}
    placed: list[tuple[PieceKey, str, int]] = []
    offset = 0
    for key, dtype in sorted(listed, key=lambda entry: -ITEM_BYTES[entry[1]]):
        end = offset + key.numel * ITEM_BYTES[dtype]
        name = piece_name(key)
        if name in header:
            raise CheckpointError(f"piece {name} comes twice on one rank. Each element must be written exactly once.")
        header[name] = {"dtype": dtype, "shape": [key.numel], "data_offsets": [offset, end]}
        placed.append((key, dtype, offset))
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the widest element type aligned
    start = 8 + len(text)
    stored = [StoredPiece(key, dtype, ITEM_BYTES[dtype], number, start + offset) for key, dtype, offset in placed]
    return len(text).to_bytes(8, "little") + text, stored


def piece_name(key: PieceKey) -> str:
    """A piece's name in its file: tensor, kind, global shape, box and range, so that the file explains itself."""
    shape = "x".join(map(str, key.shape))
    box = ",".join(f"{start}:{stop}" for start, stop in zip(key.start, key.stop, strict=True))
    return f"{key.name}|{key.kind}|{shape}|{box}|{key.first}:{key.last}"


def _typed(pieces: Pieces) -> Iterator[tuple[PieceKey, str, torch.Tensor]]:
    for key, tensor in pieces:
        if key.numel == 0 and tensor.numel() == 0:
            continue
        problem = key_problem(key)
        if problem is not None:
            raise CheckpointError(f"cannot save a piece of tensor {key.name} ({key.kind}): {problem}.")
        dtype = _NAMES.get(tensor.dtype)
        if dtype is None:
            raise CheckpointError(
                f"cannot save tensor {key.name} ({key.kind}) of element type {tensor.dtype}; "
                f"known are {', '.join(map(str, _NAMES))}."
            )
        if tensor.dim() != 1 or tensor.numel() != key.numel:
            raise CheckpointError(
                f"cannot save tensor {key.name} ({key.kind}): the piece has {key.numel} elements, but the given tensor "
                f"has shape {list(tensor.shape)}. It must be flat and of that length."
            )
        yield key, dtype, tensor


def _in_order(pieces: Pieces) -> Iterator[tuple[PieceKey, str, torch.Tensor]]:
    """The pieces in file order: wider element types first, else as they come; one pass for each width."""
    for width in sorted(set(ITEM_BYTES.values()), reverse=True):
        for key, dtype, tensor in _typed(pieces):
            if ITEM_BYTES[dtype] == width:
                yield key, dtype, tensor


def _write_tensors(
    file: _HashingFile, stored: list[StoredPiece], tensors: Iterator[tuple[PieceKey, str, torch.Tensor]]
) -> None:
    planned = iter(stored)
    for key, dtype, tensor in tensors:
        piece = next(planned, None)
        if piece is None or key != piece.key or dtype != piece.dtype:
            raise _changed("nothing" if piece is None else piece_name(piece.key), piece_name(key))
        _write_tensor(file, piece, tensor)
    left = next(planned, None)
    if left is not None:
        raise _changed(piece_name(left.key), "nothing")


def _changed(planned: str, came: str) -> CheckpointError:
    return CheckpointError(
        f"the pieces changed while they were saved: {planned} was announced, then {came} came. "
        "They must come in the same order every time."
    )


def _write_tensor(file: _HashingFile, piece: StoredPiece, tensor: torch.Tensor) -> None:
    flat = tensor.detach()
    done = 0
    while done < piece.key.numel:
        room = max(1, file.room_bytes() // piece.item_bytes)
        part = flat[done : done + room].to("cpu")
        if part.stride(0) != 1:  # also a single element can have another stride, and then has no view as bytes
            part = torch.empty(part.shape, dtype=part.dtype).copy_(part)
        file.write(part.view(torch.uint8).numpy().data)
        done += part.numel()


@final
class _HashingFile:
    """Writes bytes and keeps the SHA-256 of the whole and of every chunk, taken from memory, not from the disk."""

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
        """How much fits before the next chunk begins."""
        return self._chunk_bytes - self._filled

    def write(self, content: memoryview) -> None:
        """Writes and hashes bytes."""
        while len(content):
            part = content[: self.room_bytes()]
            self._hash_and_write(part)
            self._filled += len(part)
            content = content[len(part) :]
            if self._filled == self._chunk_bytes:
                self._close_chunk()

    def digests(self) -> tuple[str, tuple[str, ...]]:
        """The digest of the whole file and those of its chunks; nothing may be written afterwards."""
        if self._filled:
            self._close_chunk()
        return self._whole.hexdigest(), tuple(self._chunks)

    def _hash_and_write(self, part: memoryview) -> None:
        if len(part) < _WORTH_A_THREAD_BYTES:
            self._whole.update(part)
            self._chunk.update(part)
            write_all(self._storage, self._handle, part)
            return
        work: list[Future[None]] = [
            self._threads.submit(self._whole.update, part),
            self._threads.submit(self._chunk.update, part),
        ]
        try:
            write_all(self._storage, self._handle, part)
        finally:  # the hashes read memory that the caller may change as soon as this returns
            for future in work:
                future.result()

    def _close_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk = hashlib.sha256()
        self._filled = 0
