"""Whether stored values are finite, found in their bytes: an exponent of ones means NaN or infinity."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

# safetensors name -> bits of the exponent (Source: IEEE 754-2019, 3.4; bfloat16 is the upper half of binary32).
_EXPONENTS: Mapping[str, np.unsignedinteger[npt.NBitBase]] = {
    "F64": np.uint64(0x7FF << 52),
    "F32": np.uint32(0xFF << 23),
    "F16": np.uint16(0x1F << 10),
    "BF16": np.uint16(0xFF << 7),
}
_BLOCK_BYTES = 256 * 2**10  # block and scratch stay in the cache of a core


def first_not_finite(content: memoryview, dtype: str) -> int | None:
    """The number of the first element that is NaN or infinite; None if there is none, or the type knows none.

    Args:
        content: whole elements, little-endian.
        dtype: their type, as safetensors names it.
    """
    exponent = _EXPONENTS.get(dtype)
    if exponent is None or not len(content):
        return None
    bits = np.frombuffer(content, dtype=exponent.dtype.newbyteorder("<"))
    block = _BLOCK_BYTES // exponent.itemsize
    scratch = np.empty(min(block, bits.size), dtype=exponent.dtype)
    for begin in range(0, bits.size, block):
        part = bits[begin : begin + block]
        found = np.bitwise_and(part, exponent, out=scratch[: part.size])
        if found.max() == exponent:
            return begin + int(np.argmax(found == exponent))
    return None
