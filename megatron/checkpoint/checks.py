"""What the bytes of a checkpoint must be before anything is made of them: bounded, well-formed, finite.

A digest shows that bytes are those that were written, not who wrote them; so nothing here trusts its input, and nothing
here decides what a checkpoint means. A few megabytes of JSON such as `[],[],...` or of nested brackets would take
gigabytes and minutes, so what a text will take in memory is bounded before any of it becomes an object; it is searched
as bytes, which costs about as much as hashing it. A piece file must have a safetensors header that agrees with the
manifest, so that a file means the same to every program that reads safetensors.
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

LARGEST_BYTES = 192 * 2**20
"""Memory that a text and its objects may take, unless the caller knows a reason for more."""
LENGTH_BYTES = 8

_DEEPEST = 64
_MOST_RECORD_VALUES = 2**20
_MOST_RECORD_LETTERS = 16 * 2**20
_LEAST_LONG_NUMBER = 10**19  # has 20 digits
_DIGEST = re.compile(rb'"[0-9a-f]{64}"')
# Upper bounds of what CPython takes: an empty list, an object with an entry, a number or short text in a list.
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
        more_bytes: asked for texts that take more than `LARGEST_BYTES`: how much more they may.

    Raises:
        ValueError: it is not JSON, or would take too much memory, or is nested too deeply, or holds what JSON written
            by this program never does: bytes that are not ASCII, a name twice in one object, a number that is not
            finite.
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
    except RecursionError as failure:  # another stack may be nearly full already
        raise ValueError("it is nested too deeply") from failure


def check_extent(record: Any) -> None:
    """Checks that a parsed value is small enough to be copied and sent around, as the record of a checkpoint is.

    Raises:
        ValueError: it holds more values, characters, levels or digits of a number than any record does.
    """
    letters = 0
    for values, (value, level) in enumerate(every_value(record), start=1):
        if type(value) is str:
            letters += len(value)
        elif type(value) is int and abs(value) >= _LEAST_LONG_NUMBER:
            raise ValueError(f"{str(value)[:20]}... is not an integer in range: it has 20 digits or more")
        if values > _MOST_RECORD_VALUES or letters > _MOST_RECORD_LETTERS:
            raise ValueError(
                f"it holds more than {_MOST_RECORD_VALUES} values or {_MOST_RECORD_LETTERS} letters, which no run needs"
            )
        if level > _DEEPEST:
            raise ValueError(f"it is nested {level} levels deep or deeper; {_DEEPEST} are allowed")


@dataclass(frozen=True)
class HeaderEntry:
    """What the header of a safetensors file should say of a flat tensor; offsets count from the start of the file."""

    dtype: str
    numel: int
    begin_bytes: int
    end_bytes: int


def longest_header_bytes(names: Collection[str]) -> int:
    """More bytes than a header with these names has; anything longer is not read."""
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
        return "its header is not an object"
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
    block = _EXPONENT_BLOCK_BYTES // exponent.itemsize
    scratch = np.empty(min(block, bits.size), dtype=exponent.dtype)
    for begin in range(0, bits.size, block):
        part = bits[begin : begin + block]
        exponents = np.bitwise_and(part, exponent, out=scratch[: part.size])
        if exponents.max() == exponent:
            return begin + int(np.argmax(exponents == exponent))
    return None


def _check_memory(text: bytes | bytearray, more_bytes: Callable[[], int]) -> None:
    """Estimates the memory that the objects will take. What is in texts counts like structure, so that an estimate may
    be too large, never too small.
    """
    lists, objects, values, quotes = (text.count(mark) for mark in (b"[", b"{", b",", b'"'))
    has_escapes = b"\\u" in text
    # A character may take four bytes if there are escapes, except in a digest, of which there may be many.
    digests = sum(1 for _ in _DIGEST.finditer(text)) if has_escapes else 0
    letter_bytes = 4 if has_escapes else 1
    object_bytes = lists * _LIST_BYTES + objects * _OBJECT_BYTES + values * _VALUE_BYTES + quotes * _TEXT_BYTES // 2
    estimate = (2 + letter_bytes) * len(text) + object_bytes - 3 * 64 * digests
    allowed = LARGEST_BYTES
    if estimate > allowed:
        allowed += more_bytes()
    if estimate > allowed:
        raise ValueError(
            f"its {lists + objects} lists and objects, {values} values and {len(text)} letters would take about "
            f"{estimate} bytes of memory, more than the {allowed} that are allowed"
        )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number
