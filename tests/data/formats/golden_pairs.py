"""The golden bytes of a small pair of token files in both layouts, and damaged copies of them."""

import struct
from pathlib import Path

GOLDEN_IDX = bytes.fromhex(
    "4d4d49444944580000010000000000000008030000000000000003000000000000000300000002000000040000000000000000000000"
    "06000000000000000a00000000000000000000000000000002000000000000000300000000000000"
)
GOLDEN_BIN = bytes.fromhex("010002000300040005000600070008000900")
GOLDEN_CACHED_IDX = bytes.fromhex(
    "544e54494458000001000000000000000400000000000000040000000000000003000000000000000300000000000000030000000000"
    "000000000000000000000100000000000000020000000000000003000000000000000000000000000000030000000000000005000000"
    "000000000900000000000000030000000000000002000000000000000400000000000000000000000000000002000000000000000300"
    "000000000000"
)


def store(folder: Path, idx: bytes, tokens: bytes) -> str:
    """Writes a pair of token files with these bytes and gives its prefix."""
    (folder / "pair.idx").write_bytes(idx)
    (folder / "pair.bin").write_bytes(tokens)
    return str(folder / "pair")


def altered(offset: int, layout: str, value: int, idx: bytes = GOLDEN_IDX) -> bytes:
    """An index with another value, packed by `layout`, at a byte offset."""
    data = bytearray(idx)
    struct.pack_into(layout, data, offset, value)
    return bytes(data)
