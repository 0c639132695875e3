"""What a pickle becomes while it is read: plain values, places of tensors in a file, and stand-ins for the rest.

Unpickling hands a state to `__setstate__`; without that method it would set any attribute, so every class here has it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
# Bytes per element of the torch types that are admitted.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_LARGEST_ARRAY_BYTES = 2**20
_MOST_DIMENSIONS = 16
_STRUCT_CODES = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d",
}  # fmt: skip


class RefusedError(Exception):
    """A pickle asks for something that is not admitted; the text says for what."""


class AdmittedName(type):
    """The type of the classes that take the place of names in a pickle; nothing of such a name is ever imported.

    They are classes because unpickling makes objects only of classes.
    """

    text: str

    def __setattr__(cls, name: str, value: Any) -> None:
        raise RefusedError(f"the file sets an attribute of {cls.text}")

    def __setstate__(cls, state: Any) -> None:
        raise RefusedError(f"the file gives {cls.text} a state")


class _Stateless:
    """An object that takes no state from a pickle."""

    def __setstate__(self, state: Any) -> None:
        raise RefusedError(f"the file gives {shown(self)} a state")


class InertDict(dict[Any, Any]):
    """A dictionary of a class of its own; the attributes that an OrderedDict may have say nothing."""

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise RefusedError(f"the file gives {shown(self)} a state")


class StandIn:
    """An object of a foreign class: what it would have been made of."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        if self.name in NAMESPACES and not isinstance(state, dict):
            raise RefusedError(f"a namespace has the state {shown(state)}")
        self.state = state


@dataclass(frozen=True, eq=False)
class StorageBytes(_Stateless):
    """A run of bytes of the file that tensors are views of.

    Args:
        dtype: name of the element type, without "torch."; None for bytes whose type the tensor names.
    """

    begin_bytes: int
    size_bytes: int
    dtype: str | None


@dataclass(frozen=True, eq=False)
class TensorPlace(_Stateless):
    """A tensor as a view of a storage; `offset` and `strides` count elements."""

    storage: StorageBytes
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class NumberType:
    """A numpy element type: kind and width, such as f8; its byte order comes with its state."""

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or code not in _STRUCT_CODES:
            raise RefusedError(f"numpy type {shown(code)} is not admitted")
        self.code = code
        self._is_little_endian = True

    def __setstate__(self, state: Any) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) >= 2 else None
        if order not in ("<", "|", "=", ">"):
            raise RefusedError(f"a numpy type has the state {shown(state)}")
        self._is_little_endian = order != ">"

    def numbers(self, content: bytes, count: int) -> tuple[float, ...]:
        """The numbers that bytes encode.

        Raises:
            RefusedError: the bytes hold another number of them, or too many.
        """
        if count * int(self.code[1:]) != len(content) or len(content) > _LARGEST_ARRAY_BYTES:
            raise RefusedError(f"{count} numpy numbers of type {self.code} are stored in {len(content)} bytes")
        return struct.unpack(f"{'<' if self._is_little_endian else '>'}{count}{_STRUCT_CODES[self.code]}", content)


class NumberArray:
    """A numpy array: made empty, filled by its state."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.code = ""
        self.numbers: Sequence[float] = ()

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], NumberType):
            raise RefusedError(f"a numpy array has the state {shown(state)}")
        _, shape, number_type, is_fortran, content = state
        sizes = whole_numbers(shape, "the shape of a numpy array")
        if is_fortran not in (False, 0) or not isinstance(content, bytes):
            raise RefusedError("a numpy array is not stored as rows of bytes")
        self.shape, self.code = sizes, number_type.code
        self.numbers = number_type.numbers(content, math.prod(sizes))


def whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    """A tuple or list of whole numbers >= 0, at most 16 of them.

    Raises:
        RefusedError: it is something else.
    """
    if not isinstance(values, tuple | list) or len(values) > _MOST_DIMENSIONS:
        raise RefusedError(f"{what} is {shown(values)}, not a short list of numbers")
    for value in values:
        if type(value) is not int or not 0 <= value < 2**62:
            raise RefusedError(f"{what} has the entry {shown(value)}, which is not a number in range")
    return tuple(values)


def shown(value: Any) -> str:
    """A value as it appears in an error text, short whatever it holds."""
    if isinstance(value, AdmittedName):
        value = value.text
    if isinstance(value, bool | float | str) or value is None or (isinstance(value, int) and abs(value) < 2**64):
        text = value if isinstance(value, str) else repr(value)
        return "".join(letter if letter.isprintable() else "?" for letter in text[:80])
    return f"a value of type {type(value).__name__}"
