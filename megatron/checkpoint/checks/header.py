"""The header of a piece file: it must be that of a safetensors file and agree with the manifest.

So a file of a checkpoint means the same to every program that reads safetensors, and no offset of the manifest points
into a header or outside the data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron.checkpoint.checks.bounded_json import parse_bounded

LENGTH_BYTES = 8
_METADATA = "__metadata__"
_LONGEST_METADATA_BYTES = 2**16
_LONGEST_ENTRY_BYTES = 150  # beside its name


@dataclass(frozen=True)
class HeaderEntry:
    """What the header of a safetensors file should say of a flat tensor; offsets count from the start of the file."""

    dtype: str
    numel: int
    begin_bytes: int
    end_bytes: int


def longest_header_bytes(names: Collection[str]) -> int:
    """More than a header with these names has, so that none is read that cannot be one."""
    return _LONGEST_METADATA_BYTES + sum(2 * len(name) + _LONGEST_ENTRY_BYTES for name in names)


def header_problem(content: bytes | bytearray, expected: Mapping[str, HeaderEntry]) -> str | None:
    """What is wrong with the header of a file, or None if it lists exactly what is expected.

    Args:
        content: of the file between the length of the header and the first tensor.

    Source: safetensors README, "Format": 8 bytes little-endian header length, JSON header, the tensors without holes.
    """
    try:
        header = parse_bounded(content)
    except ValueError as failure:
        return f"its header is not that of a safetensors file: {failure}"
    if not isinstance(header, dict):
        return "its header is no object"
    listed = len(header) - (_METADATA in header)
    if listed != len(expected):
        return f"its header lists {listed} pieces, and the manifest has {len(expected)} in it"
    start = LENGTH_BYTES + len(content)
    for name, entry in expected.items():
        described = {
            "dtype": entry.dtype,
            "shape": [entry.numel],
            "data_offsets": [entry.begin_bytes - start, entry.end_bytes - start],
        }
        if header.get(name) != described:
            return f"its header says otherwise than the manifest of piece {name}"
    return None
