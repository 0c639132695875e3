"""The bytes of an index for sequences that come in any order and in any pieces."""

import numpy as np
import pytest

from megatron.data.formats.index_layout import IndexLayout

LENGTHS = np.array([3, 2, 4], np.int64)
MMAP = bytes.fromhex(
    "4d4d49444944580000010000000000000008030000000000000003000000000000000300000002000000040000000000000000000000"
    "06000000000000000a00000000000000000000000000000002000000000000000300000000000000"
)


def put_together(layout: IndexLayout, cuts: list[int]) -> bytes:
    """The whole file from the entries of stretches of sequences, the last stretch first."""
    data = bytearray(b"\xff" * layout.size_bytes)
    entries = list(layout.frame())
    for first, last in reversed(list(zip([0, *cuts], [*cuts, len(LENGTHS)], strict=True))):
        entries += layout.of_sequences(first, LENGTHS[first:last], int(LENGTHS[:first].sum()))
    entries.append(layout.of_documents(0, np.array([2, 3])))
    for offset, part in entries:
        data[offset : offset + len(part)] = part
    return bytes(data)


@pytest.mark.parametrize("cuts", [[], [1], [1, 2]])
def test_chunks_in_any_order_give_the_same_file(cuts: list[int]) -> None:
    layout = IndexLayout(False, 3, 2, np.dtype("<u2"), tokens=9)
    assert put_together(layout, cuts) == MMAP
    cached = IndexLayout(True, 3, 2, np.dtype("<u2"), tokens=9)
    assert put_together(cached, cuts) == put_together(cached, []) and b"\xff" not in put_together(cached, cuts)
