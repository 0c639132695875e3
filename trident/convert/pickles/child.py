"""The child process that unpickles: `python -m trident.convert.pickles.child MEMORY SECONDS`.

It inherits files as open descriptors, receives the ranges to read on standard input and limits itself (files, sockets,
processes, memory, time) before it reads the first byte. The response is one line of JSON whose size is bounded by the
number of values: every container is described once and referred to by index. Strings, numbers, true, false and null are
literal; `[n]` refers to entry n, which precedes it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from trident.convert.pickles.containers import FileRange, read_range
from trident.convert.pickles.unpickler import (
    AllowedGlobal,
    NumberArray,
    NumberType,
    RefusedError,
    StorageBytes,
    Stub,
    TensorView,
    shown,
)

Entry = list[Any]

_DEEPEST = 200
_MOST_COPIES = 64
_MOST_BITS = 256
_ALWAYS_ALLOWED = 2**22


def main(argv: list[str]) -> None:
    """Handles one request.

    Args:
        argv: bytes of memory, seconds of processor time.
    """
    memory_bytes, processor_seconds = map(int, argv)
    _limit_resources(memory_bytes, processor_seconds)
    text = json.dumps(_responses(memory_bytes)).encode()
    while text:
        text = text[os.write(1, text) :]


def _responses(memory_bytes: int) -> list[dict[str, Any]]:
    request = bytearray()
    while block := os.read(0, 2**16):
        request += block

    def file_range(file: int, start: int, end: int) -> FileRange:
        return FileRange(lambda offset_bytes, count: os.pread(file, count, offset_bytes), start, end)

    return [_response(file_range(*row), memory_bytes) for row in json.loads(bytes(request))]


def _response(file: FileRange, memory_bytes: int) -> dict[str, Any]:
    try:
        return _Describer().describe(read_range(file))
    except RefusedError as failure:
        return {"refused": str(failure)}
    except MemoryError:
        return {"refused": f"reading it takes more than {memory_bytes} bytes of memory"}
    except Exception as failure:  # damage that no check covers
        return {"refused": f"it is damaged ({type(failure).__name__}: {shown(str(failure))})"}


def _limit_resources(memory_bytes: int, processor_seconds: int) -> None:
    """Sets hard limits. Without new descriptors no file, socket or pipe can be opened."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: processor_seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 0,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))


class _Describer:
    """Visits values without recursion: children first, each once.

    Rejects a value that contains itself, is nested too deeply, or would be far larger without sharing.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int | None] = {}  # by identity; None while the value's children are visited
        self._entries: list[Entry] = []
        self._depths: list[int] = []
        self._sizes: list[int] = []  # number of values in an entry without sharing

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
        if size > max(_ALWAYS_ALLOWED, _MOST_COPIES * len(self._entries)):
            raise RefusedError(f"a value of it has {size if size < 2**64 else 'more than 2^64'} values in it")
        self._depths.append(depth)
        self._sizes.append(size)

    def _reference(self, value: Any) -> Any:
        return value if _is_plain(value) else [self._numbers[id(value)]]


def _is_plain(value: Any) -> bool:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise RefusedError(f"an integer of {value.bit_length()} bits is not allowed")
    return value is None or isinstance(value, bool | int | float | str)


def _children(value: Any) -> list[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, dict):
        return [side for pair in value.items() for side in pair]
    if isinstance(value, Stub):
        return [value.arguments, value.state]
    return []


def _entry(value: Any, refer: Callable[[Any], Any]) -> Entry:
    if isinstance(value, list):
        return ["list", [refer(item) for item in value]]
    if isinstance(value, tuple | set | frozenset):
        return ["tuple", [refer(item) for item in value]]
    if isinstance(value, dict):
        return ["table", [[refer(key), refer(item)] for key, item in value.items()]]
    if isinstance(value, Stub):
        return ["object", value.name, refer(value.arguments), refer(value.state)]
    if isinstance(value, TensorView):
        storage = value.storage
        view = [storage.start_bytes, storage.size_bytes, value.dtype, value.offset, value.shape, value.strides]
        return ["tensor", *view]
    if isinstance(value, NumberArray):
        return ["array", value.code, value.shape, value.numbers]
    if isinstance(value, AllowedGlobal):
        return ["name", value.text]
    if isinstance(value, NumberType):
        return ["name", f"numpy.{value.code}"]
    if isinstance(value, StorageBytes):
        return ["name", "torch.UntypedStorage"]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    raise RefusedError(f"a value of type {type(value).__name__} cannot be described")


if __name__ == "__main__":
    main(sys.argv[1:])
