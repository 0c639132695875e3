"""The pieces that one rank saves: listed once, with values that are read as they are written.

A snapshot with values in a separate buffer can be written by another thread while training continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron.checkpoint.catalogue import ITEM_BYTES
from megatron.checkpoint.layout import key_problem
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


@dataclass(frozen=True)
class Snapshot:
    """The pieces that one rank writes.

    Args:
        listed: key and element type (safetensors name) of every non-empty piece, in order.
        pieces: the same pieces with their values, flat tensors; iterated over several times during the write.
    """

    listed: tuple[tuple[PieceKey, str], ...]
    pieces: Pieces

    @property
    def size_bytes(self) -> int:
        return sum(key.numel * ITEM_BYTES[dtype] for key, dtype in self.listed)

    def tensors(self) -> Iterator[tuple[PieceKey, str, torch.Tensor]]:
        """The listed pieces with their values, in file order: wider element types first.

        Raises:
            CheckpointError: the pieces differ from the listed ones.
        """
        listed = iter(sorted(self.listed, key=lambda entry: -ITEM_BYTES[entry[1]]))
        widths = sorted({ITEM_BYTES[dtype] for _, dtype in self.listed}, reverse=True)
        for width in widths:
            for key, dtype, tensor in _typed(self.pieces):
                if ITEM_BYTES[dtype] != width and ITEM_BYTES[dtype] in widths:
                    continue
                expected = next(listed, None)
                if expected != (key, dtype):
                    raise _changed("nothing" if expected is None else piece_name(expected[0]), piece_name(key))
                yield key, dtype, tensor
        missing = next(listed, None)
        if missing is not None:
            raise _changed(piece_name(missing[0]), "nothing")


def take_snapshot(pieces: Pieces) -> Snapshot:
    """Lists the pieces of this rank; their values must not change until they are written.

    Args:
        pieces: flat tensors on any device.

    Raises:
        CheckpointError: a tensor does not match its key, or a piece is duplicated.
    """
    if isinstance(pieces, Iterator):
        pieces = list(pieces)  # they are iterated over again
    listed = tuple((key, dtype) for key, dtype, _ in _typed(pieces))
    seen: set[PieceKey] = set()
    for key, _ in listed:
        if key in seen:
            raise CheckpointError(
                f"piece {piece_name(key)} is duplicated on one rank. Each element must be written exactly once."
            )
        seen.add(key)
    return Snapshot(listed, pieces)


def plan_copy(snapshot: Snapshot, buffer: torch.Tensor) -> tuple[Snapshot, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The snapshot with its values in a buffer, and the copies to make: pairs of (target, source).

    Args:
        buffer: on the host, at least `snapshot.size_bytes` long. Shapes: `[bytes]` uint8.
    """
    sources = [(key, tensor) for key, tensor in snapshot.pieces if key.numel]
    entries = [(key, dtype, tensor) for (key, dtype), (_, tensor) in zip(snapshot.listed, sources, strict=True)]
    entries.sort(key=lambda entry: -ITEM_BYTES[entry[1]])  # so that every view of the buffer is aligned
    copied: list[tuple[PieceKey, torch.Tensor]] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    offset = 0
    for key, dtype, tensor in entries:
        end = offset + key.numel * ITEM_BYTES[dtype]
        target = buffer[offset:end].view(TORCH_TYPES[dtype])
        copied.append((key, target))
        copies.append((target, tensor.detach()))
        offset = end
    return Snapshot(tuple((key, dtype) for key, dtype, _ in entries), copied), copies


def piece_name(key: PieceKey) -> str:
    """The self-explanatory name of a piece in its file: tensor, kind, global shape, box and range."""
    shape = "x".join(map(str, key.shape))
    box = ",".join(f"{start}:{stop}" for start, stop in zip(key.start, key.stop, strict=True))
    return f"{key.name}|{key.kind}|{shape}|{box}|{key.first}:{key.last}"


def _typed(pieces: Pieces) -> Iterator[tuple[PieceKey, str, torch.Tensor]]:
    """The non-empty pieces with the name of their element type, each checked against its key."""
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
                f"supported types: {', '.join(map(str, _NAMES))}."
            )
        if tensor.dim() != 1 or tensor.numel() != key.numel:
            raise CheckpointError(
                f"cannot save tensor {key.name} ({key.kind}): expected a flat tensor of {key.numel} elements, got "
                f"shape {list(tensor.shape)}."
            )
        yield key, dtype, tensor


def _changed(expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"the pieces changed while they were saved: expected {expected}, got {got}. Their order must not change."
    )
