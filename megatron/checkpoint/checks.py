"""Validation of untrusted checkpoint bytes: bounded, well-formed, finite.

A digest proves that bytes are unchanged, not who wrote them, so nothing here trusts its input. A few megabytes of JSON
such as `[],[],...` or nested brackets would take gigabytes and minutes, so the memory that a text will take is bounded
before any object is created; the scan works on bytes and costs about as much as hashing. A piece file must have a
safetensors header that agrees with the manifest, so that every safetensors reader interprets it alike.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from megatron.files.settings import every_value, without_repeats

LARGEST_BYTES = 192 * 2**20  # memory for a text and its objects, unless the caller allows more
LENGTH_BYTES = 8

_DEEPEST = 64
_MOST_RECORD_VALUES = 2**20
_MOST_RECORD_LETTERS = 16 * 2**20
_LEAST_LONG_NUMBER = 10**19  # has 20 digits
_DIGEST = re.compile(rb'"[0-9a-f]{64}"')
# Upper bounds of CPython's memory for an empty list, an object with an entry, a number or short text in a list.
_LIST_BYTES, _OBJECT_BYTES, _VALUE_BYTES, _TEXT_BYTES = 80, 240, 40, 64
_METADATA = "__metadata__"
_LONGEST_METADATA_BYTES = 2**16
_LONGEST_ENTRY_BYTES = 150  # besides its name
# safetensors name -> bits of the exponent (Source: IEEE 754-2019, 3.4; bfloat16 is the upper half of binary32).
_EXPONENTS: Mapping[str, np.unsignedinteger[npt.NBitBase]] = {
    "F64": np.uint64(0x7FF << 52),
    "F32": np.uint32(0xFF << 23),
    "F16": np.uint16(0x1F << 10),
    "BF16": np.uint16(0xFF << 7),
}
_EXPONENT_BLOCK_BYTES = 256 * 2**10  # block and scratch stay in the cache of a core


def parse_bounded(text: bytes | bytearray, more_bytes: Callable[[], int] = lambda: 0) -> Any:
    """Parses ASCII JSON.

    Args:
        more_bytes: returns how much more than `LARGEST_BYTES` the text may take; called only if it takes more.

    Raises:
        ValueError: it is not JSON, would take too much memory, is nested too deeply, or contains something that this
            program never writes: non-ASCII bytes, a duplicate name in an object, a number that is not finite.
    """
    if not text.isascii():
        raise ValueError("it has bytes that are not ASCII")
    _check_memory(text, more_bytes)
    try:
        return json.loads(
            text.decode("ascii"),
            object_pairs_hook=without_repeats(lambda name: ValueError("a name appears twice in one object")),
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError as failure:  # the caller's stack may be nearly full already
        raise ValueError("it is nested too deeply") from failure


def check_extent(record: Any) -> None:
    """Checks that a parsed record is small enough to be copied and sent between ranks.

    Raises:
        ValueError: it has more values, characters, levels or digits in a number than any record has.
    """
    letters = 0
    for values, (value, level) in enumerate(every_value(record), start=1):
        if type(value) is str:
            letters += len(value)
        elif type(value) is int and abs(value) >= _LEAST_LONG_NUMBER:
            raise ValueError(f"{str(value)[:20]}... is not an integer in range: it has 20 digits or more")
        if values > _MOST_RECORD_VALUES or letters > _MOST_RECORD_LETTERS:
            raise ValueError(f"it has more than {_MOST_RECORD_VALUES} values or {_MOST_RECORD_LETTERS} characters")
        if level > _DEEPEST:
            raise ValueError(f"it is nested at least {level} levels deep; {_DEEPEST} are allowed")


@dataclass(frozen=True)
class HeaderEntry:
    """The expected header entry of a flat tensor in a safetensors file; offsets count from the start of the file."""

    dtype: str
    numel: int
    begin_bytes: int
    end_bytes: int


def longest_header_bytes(names: Collection[str]) -> int:
    """An upper bound on the size of a header with these names; anything longer is not read."""
    return _LONGEST_METADATA_BYTES + sum(2 * len(name) + _LONGEST_ENTRY_BYTES for name in names)


def header_problem(content: bytes | bytearray, expected: Mapping[str, HeaderEntry]) -> str | None:
    """Describes the problem with the header of a file; None if it lists exactly the expected entries.

    Args:
        content: the bytes between the header length and the first tensor.

    Source: safetensors README, "Format": 8 bytes little-endian header length, JSON header, the tensors without holes.
    """
    try:
        header = parse_bounded(content)
    except ValueError as failure:
        return f"its header is not a safetensors header: {failure}"
    if not isinstance(header, dict):
        return "its header is not an object"
    listed = len(header) - (_METADATA in header)
    if listed != len(expected):
        return f"its header lists {listed} pieces, but the manifest lists {len(expected)}"
    start = LENGTH_BYTES + len(content)
    for name, entry in expected.items():
        described = {
            "dtype": entry.dtype,
            "shape": [entry.numel],
            "data_offsets": [entry.begin_bytes - start, entry.end_bytes - start],
        }
        if header.get(name) != described:
            return f"its header disagrees with the manifest about piece {name}"
    return None


def first_not_finite(content: memoryview, dtype: str) -> int | None:
    """The index of the first element that is NaN or infinite; None if all are finite.

    Args:
        content: whole elements, little-endian.
        dtype: element type, as safetensors names it.
    """
    exponent = _EXPONENTS.get(dtype)
    if exponent is None or not len(content):
        return None
    bits = np.frombuffer(content, dtype=exponent.dtype.newbyteorder("<"))
    block = _EXPONENT_BLOCK_BYTES // exponent.itemsize
    scratch = np.empty(min(block, bits.size), dtype=exponent.dtype)
    for start in range(0, bits.size, block):
        part = bits[start : start + block]
        exponents = np.bitwise_and(part, exponent, out=scratch[: part.size])
        if exponents.max() == exponent:
            return start + int(np.argmax(exponents == exponent))
    return None


def _check_memory(text: bytes | bytearray, more_bytes: Callable[[], int]) -> None:
    """Bounds the memory of the parsed objects from above: characters inside strings count as structure, too."""
    lists, objects, values, quotes = (text.count(mark) for mark in (b"[", b"{", b",", b'"'))
    has_escapes = b"\\u" in text
    # With escapes a character may take four bytes, except in the digests, which may be many.
    digests = sum(1 for _ in _DIGEST.finditer(text)) if has_escapes else 0
    letter_bytes = 4 if has_escapes else 1
    object_bytes = lists * _LIST_BYTES + objects * _OBJECT_BYTES + values * _VALUE_BYTES + quotes * _TEXT_BYTES // 2
    estimate = (2 + letter_bytes) * len(text) + object_bytes - 3 * 64 * digests
    allowed = LARGEST_BYTES
    if estimate > allowed:
        allowed += more_bytes()
    if estimate > allowed:
        raise ValueError(
            f"its {lists + objects} lists and objects, {values} values and {len(text)} characters would take about "
            f"{estimate} bytes of memory; {allowed} are allowed"
        )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number
