"""The header of a piece file: it must be that of a safetensors file and agree with the manifest.

So a file of a checkpoint means the same to every program that reads safetensors, and no offset of the manifest points
into a header or outside the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatron.checkpoint.checks.bounded_json import parse_bounded
from megatron.checkpoint.layout import StoredPiece
from megatron.checkpoint.snapshot import piece_name

LENGTH_BYTES = 8
_METADATA = "__metadata__"


def longest_header_bytes(pieces: Iterable[StoredPiece]) -> int:
    """More than a header of these pieces has, so that none is read that cannot be one."""
    return 2**16 + 2 * sum(len(piece_name(piece.key)) + 150 for piece in pieces)


def header_problem(content: bytes | bytearray, pieces: Sequence[StoredPiece]) -> str | None:
    """What is wrong with the header of a file, or None if it lists exactly the pieces that the manifest has there.

    Args:
        content: of the file between the length of the header and the first piece.
        pieces: those in the file.

    Source: safetensors README, "Format": 8 bytes little-endian header length, JSON header, the tensors without holes.
    """
    try:
        header = parse_bounded(content)
    except ValueError as failure:
        return f"its header is not that of a safetensors file: {failure}"
    if not isinstance(header, dict):
        return "its header is no object"
    listed = len(header) - (_METADATA in header)
    if listed != len(pieces):
        return f"its header lists {listed} pieces, and the manifest has {len(pieces)} in it"
    start = LENGTH_BYTES + len(content)
    for piece in pieces:
        if header.get(piece_name(piece.key)) != _entry(piece, start):
            return f"its header says otherwise than the manifest of piece {piece_name(piece.key)}"
    return None


def _entry(piece: StoredPiece, start: int) -> dict[str, Any]:
    return {
        "dtype": piece.dtype,
        "shape": [piece.key.numel],
        "data_offsets": [piece.begin_bytes - start, piece.end_bytes - start],
    }
