"""Streams the snapshot of one rank into a safetensors file; checks and hashes the bytes in memory, before the disk.

No tensor is copied whole; one on another device crosses to the host in chunks. Values that are not finite are refused:
a run could never continue from them, and the checkpoint would take the place of one from which it can.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from megatron.checkpoint.layout import StoredPiece
from megatron.checkpoint.manifest import FORMAT, FORMAT_VERSION, ITEM_BYTES, StoredFile
from megatron.checkpoint.snapshot import Snapshot, piece_name
from megatron.checkpoint.storage import Storage, append, writing
from megatron.errors import NumericsError
from megatron.parallel.pieces import PieceKey

# Shorter buffers are hashed at once; for longer ones threads hash while this one writes (hashing releases the GIL).
_WORTH_A_THREAD_BYTES = 256 * 2**10
# The square of this is infinite in float32, and so is the norm of anything that holds it.
_LEAST_UNUSABLE = 2.0**64


def write_pieces(
    path: Path,
    taken: Snapshot,
    chunk_bytes: int,
    storage: Storage,
    *,
    beat: Callable[[], None] = lambda: None,
    check_finite: bool = True,
) -> tuple[StoredFile, list[StoredPiece]]:
    """Writes a new file and waits until it is on the disk; returns the manifest's entries for it and its pieces.

    The pieces have file number 0; the manifest numbers the files later.

    Args:
        beat: called before each part that is written; it may raise to end the writing.
        check_finite: refuse NaN and infinities.

    Raises:
        CheckpointError: the pieces changed since the snapshot was taken.
        NumericsError: a value is NaN or infinite, or so large that its square is.
        StorageError: the file system refused.
    """
    listed = sorted(taken.listed, key=lambda entry: -ITEM_BYTES[entry[1]])
    metadata = {"format": FORMAT, "format_version": str(FORMAT_VERSION)}
    header, begins = safetensors_header(metadata, [(piece_name(key), dtype, [key.numel]) for key, dtype in listed])
    stored = [
        StoredPiece(key, dtype, ITEM_BYTES[dtype], 0, begin) for (key, dtype), begin in zip(listed, begins, strict=True)
    ]
    size_bytes = max(piece.end_bytes for piece in stored) if stored else len(header)
    with writing(storage, path, size_bytes) as handle, _HashingFile(storage, handle, chunk_bytes) as file:
        file.write(memoryview(header))
        for key, dtype, tensor in taken.tensors():
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
    """The first bytes of a file (length, header), and where each tensor begins in it.

    Args:
        tensors: name, element type and shape, in the order of the file; wider element types first, so that all are
            aligned.

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
    """A flat tensor on the host in parts that each fit into a chunk of the file, and the first element of each."""
    flat = tensor.detach()
    done = 0
    while done < flat.numel():
        room = max(1, file.room_bytes() // item_bytes)
        part = flat[done : done + room].to("cpu")
        if part.stride(0) != 1:  # even a single element can have another stride, and then it has no view as bytes
            part = torch.empty(part.shape, dtype=part.dtype).copy_(part)
        yield part, done
        done += part.numel()


def _check_finite(key: PieceKey, part: torch.Tensor, first: int) -> None:
    """Refuses NaN, infinities and values whose square is infinite in the elements of a piece from `first` on.

    NumPy needs fewer passes for it than torch, and one thread.
    """
    if not part.is_floating_point():
        return
    if part.dtype == torch.bfloat16:  # which NumPy does not know: an exponent of 2^64 or above, which NaN has too
        wrong = (part.view(torch.int16).numpy() & 0x7F80) >= 0x5F80
    elif part.dtype == torch.float16:
        wrong = ~np.isfinite(part.numpy())
    else:
        wrong = ~(np.abs(part.numpy()) < _LEAST_UNUSABLE)
    if wrong.any():
        place = int(wrong.argmax())
        raise NumericsError(
            f"tensor {key.name} ({key.kind}) holds {float(part[place])} at element {first + place} of the piece "
            f"{piece_name(key)}. Nothing was saved: no run can continue from values that are not finite or reach 2^64, "
            "where squares are infinite. Earlier checkpoints are untouched. Resume from the last one with a lower "
            "--lr, a longer warm-up or --skip-train-iteration-range."
        )


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
        """The digests of the whole file and of its chunks; nothing may be written afterwards."""
        if self._filled:
            self._close_chunk()
        return self._whole.hexdigest(), tuple(self._chunks)

    def _hash_and_write(self, part: memoryview) -> None:
        if len(part) < _WORTH_A_THREAD_BYTES:
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
        finally:  # the hashes read memory that the caller may change as soon as this returns
            for future in work:
                future.result()

    def _close_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk = hashlib.sha256()
        self._filled = 0
