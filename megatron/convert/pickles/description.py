"""Values as JSON that cannot grow beyond their number: every container is described once and referred to by number.

Texts, numbers, true, false and null stand for themselves; `[n]` refers to value n of the list, which comes before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.convert.pickles.values import (
    Members,
    Name,
    NumberArray,
    NumberType,
    RefusedError,
    StandIn,
    Storage,
    Table,
    TensorPlace,
)

Entry = list[Any]

_DEEPEST = 200
_MOST_COPIES = 64
_ALWAYS_ADMITTED = 2**22


def describe(value: Any) -> dict[str, Any]:
    """The JSON object of a value.

    Raises:
        RefusedError: it contains itself, is nested too deeply, or would be far larger if nothing in it were shared.
    """
    return _Describer().describe(value)


class _Describer:
    """Visits values without recursion: children first, each once."""

    def __init__(self) -> None:
        self._numbers: dict[int, int | None] = {}  # by identity; None while the value's children are visited
        self._entries: list[Entry] = []
        self._depths: list[int] = []
        self._sizes: list[int] = []  # number of values that an entry would hold if none were shared

    def describe(self, value: Any) -> dict[str, Any]:
        pending = [value]
        while pending:
            current = pending[-1]
            if _is_plain(current) or self._numbers.get(id(current)) is not None:
                pending.pop()
                continue
            children = [child for child in _children(current) if not _is_plain(child)]
            open_children = [child for child in children if self._numbers.get(id(child)) is None]
            if id(current) not in self._numbers:
                self._numbers[id(current)] = None
                for child in open_children:
                    if id(child) in self._numbers:
                        raise RefusedError("a value of the pickle contains itself")
                pending.extend(open_children)
                if open_children:
                    continue
            elif open_children:
                raise RefusedError("a value of the pickle contains itself")
            self._measure([self._numbers[id(child)] or 0 for child in children], len(_children(current)))
            self._numbers[id(current)] = len(self._entries)
            self._entries.append(_entry(current, self._reference))
            pending.pop()
        return {"entries": self._entries, "value": self._reference(value)}

    def _measure(self, children: list[int], count: int) -> None:
        depth = 1 + max((self._depths[child] for child in children), default=0)
        size = 1 + count + sum(self._sizes[child] for child in children)
        if depth > _DEEPEST:
            raise RefusedError(f"its values are nested more than {_DEEPEST} deep")
        if size > max(_ALWAYS_ADMITTED, _MOST_COPIES * len(self._entries)):
            raise RefusedError(f"a value of it has {size if size < 2**64 else 'more than 2^64'} values in it")
        self._depths.append(depth)
        self._sizes.append(size)

    def _reference(self, value: Any) -> Any:
        return value if _is_plain(value) else [self._numbers[id(value)]]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _children(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, Table):
        return [side for pair in value.pairs for side in pair]
    if isinstance(value, Members):
        return value.items
    if isinstance(value, StandIn):
        return [value.arguments, value.state]
    return []


def _entry(value: Any, refer: Callable[[Any], Any]) -> Entry:
    if isinstance(value, list):
        return ["list", [refer(item) for item in value]]
    if isinstance(value, tuple):
        return ["tuple", [refer(item) for item in value]]
    if isinstance(value, Table):
        return ["table", [[refer(key), refer(item)] for key, item in value.pairs]]
    if isinstance(value, Members):
        return ["set", [refer(item) for item in value.items]]
    if isinstance(value, StandIn):
        return ["object", value.name, refer(value.arguments), refer(value.state)]
    if isinstance(value, TensorPlace):
        storage = value.storage
        place = [storage.begin_bytes, storage.size_bytes, value.dtype, value.offset, value.shape, value.strides]
        return ["tensor", *place]
    if isinstance(value, NumberArray):
        return ["array", value.code, value.shape, value.numbers]
    if isinstance(value, Name):
        return ["name", value.text]
    if isinstance(value, NumberType):
        return ["name", f"numpy.{value.code}"]
    if isinstance(value, Storage):
        return ["name", "torch.UntypedStorage"]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    raise RefusedError(f"a value of type {type(value).__name__} cannot be described")
