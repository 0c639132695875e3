"""What the interpreter of pickles makes: plain values, places of tensors in a file, and stand-ins for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class RefusedError(Exception):
    """A pickle asks for something that is not admitted; the text says for what."""


@dataclass(frozen=True)
class Name:
    """The name of a class or function in a pickle. Nothing of that name is ever imported."""

    text: str


@dataclass(eq=False)
class Table:
    """A dictionary as its pairs, in the order of the file: keys are not hashed while a pickle is read."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(eq=False)
class StandIn:
    """An object of a foreign class: what it would have been made of."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(eq=False)
class Members:
    """A set as the list of its members."""

    items: list[Any]


@dataclass(frozen=True, eq=False)
class Storage:
    """A run of bytes of the file that tensors are views of.

    Args:
        dtype: name of the element type, without "torch."; None for bytes whose type the tensor names.
    """

    begin_bytes: int
    size_bytes: int
    dtype: str | None


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """A tensor as a view of a storage; `offset` and `strides` count elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(eq=False)
class NumberType:
    """A numpy element type: kind and width, such as f8; its byte order comes with its state."""

    code: str
    little_endian: bool = True


@dataclass(eq=False)
class NumberArray:
    """A numpy array: made empty, filled by its state."""

    shape: tuple[int, ...] = ()
    code: str = ""
    numbers: Sequence[float] = ()


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
