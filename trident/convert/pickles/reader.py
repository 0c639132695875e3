"""Reads foreign pickles: a child process says what is in the file, and tensors are read from the file directly."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.storage import DISK, opened, read_range, unreadable
from megatron.errors import CheckpointError
from trident.convert.pickles.unpickler import NAMESPACES

_ROOT = Path(__file__).resolve().parents[3]
_CHILD = "trident.convert.pickles.child"
_LARGEST_ANSWER_BYTES = 2**30
_FILES_PER_CHILD = 128

# A file and the part of it that is wanted; None means all of it.
Wanted = tuple[Path, tuple[int, int] | None]


@dataclass(frozen=True)
class PickleLimits:
    """What reading one file may take."""

    memory_bytes: int = 4 * 2**30
    processor_seconds: int = 300


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of a foreign file that is not read yet; `offset` and `strides` count elements of the storage."""

    path: Path
    begin_bytes: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self) -> torch.Tensor:
        """The values; only the bytes between its first and its last element are read.

        Raises:
            CheckpointError: the file cannot be read any more.
        """
        if self.numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return self.flat(0, span).as_strided(self.shape, self.strides)

    def flat(self, first: int, last: int) -> torch.Tensor:
        """Elements of the storage, counted from the tensor's first one.

        Raises:
            CheckpointError: the file cannot be read any more.
        """
        values = torch.empty(last - first, dtype=self.dtype)
        place = self.begin_bytes + (self.offset + first) * self.dtype.itemsize
        try:
            with opened(DISK, self.path) as (handle, _):
                read_range(DISK, handle, values.view(torch.uint8).numpy().data, place)
        except OSError as failure:
            raise unreadable(self.path, failure) from failure
        return values


@dataclass(frozen=True, eq=False)
class ForeignObject:
    """An object of a foreign class: its name, and what it would have been made of."""

    name: str
    arguments: tuple[Any, ...]
    state: Any

    def fields(self) -> dict[str, Any]:
        """Its attributes; empty where its state is something else."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True, eq=False)
class ForeignTable:
    """A dictionary whose keys are not numbers and texts, as pairs."""

    pairs: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, eq=False)
class ForeignArray:
    """A numpy array as its numbers, row-major."""

    shape: tuple[int, ...]
    numbers: tuple[float, ...]


def read_pickle(path: Path, limits: PickleLimits | None = None) -> Any:
    """The content of a file that torch.save or pickle wrote.

    Dictionaries, lists, tuples, numbers, texts and bytes are themselves, an `argparse.Namespace` is a dictionary, a
    tensor a `ForeignTensor`, a numpy array a `ForeignArray`, an object of Megatron's or DeepSpeed's a `ForeignObject`.

    Raises:
        CheckpointError: the file asks for anything else, is damaged, or takes too much memory or time.
        StorageError: the system refused to open it.
    """
    return read_pickles([path], limits)[0]


def read_pickles(paths: Sequence[Path], limits: PickleLimits | None = None) -> list[Any]:
    """The contents of several files; many of them share a child process.

    Raises:
        as `read_pickle`.
    """
    contents: list[Any] = []
    for first in range(0, len(paths), _FILES_PER_CHILD):
        some = [(path, None) for path in paths[first : first + _FILES_PER_CHILD]]
        contents += _read(some, limits or PickleLimits())
    return contents


def read_ranges(path: Path, ranges: Sequence[tuple[int, int]], limits: PickleLimits | None = None) -> list[Any]:
    """The contents of parts of a file, each from a first byte up to a last one.

    Raises:
        as `read_pickle`.
    """
    return _read([(path, bounds) for bounds in ranges], limits or PickleLimits())


def _read(wanted: Sequence[Wanted], limits: PickleLimits) -> list[Any]:
    values = []
    for (path, _), answer in zip(wanted, outcomes(wanted, limits), strict=True):
        if "refused" in answer:
            raise CheckpointError(
                f"{path} is refused: {answer['refused']}. Only tensors, numbers, texts and containers of them are read "
                "from files of other programs; nothing in them is executed."
            )
        values.append(_Values(path, answer["entries"]).resolve(answer["value"]))
    return values


def outcomes(wanted: Sequence[Wanted], limits: PickleLimits) -> list[dict[str, Any]]:
    """What the child process says of each part of a file: its description, or {"refused": why}.

    Raises:
        CheckpointError: a part is not in its file, or the child reached a limit.
        StorageError: the system refused to open a file.
    """
    rows, handles = [], {}
    with contextlib.ExitStack() as closing:
        for path, bounds in wanted:
            if path not in handles:
                try:
                    handles[path] = closing.enter_context(opened(DISK, path))
                except OSError as failure:
                    raise unreadable(path, failure) from failure
            handle, size_bytes = handles[path]
            begin, end = bounds or (0, size_bytes)
            if not 0 <= begin < end <= size_bytes:
                raise CheckpointError(
                    f"bytes {begin} to {end} of {path} are wanted, but it has {size_bytes}. It is incomplete; copy it "
                    "again."
                )
            rows.append((handle, begin, end))
        return _ask_child(list(handles), [handle for handle, _ in handles.values()], rows, limits)


def _ask_child(
    paths: Sequence[Path], handles: Sequence[int], rows: Sequence[tuple[int, int, int]], limits: PickleLimits
) -> list[dict[str, Any]]:
    with subprocess.Popen(
        [sys.executable, "-E", "-S", "-m", _CHILD, str(limits.memory_bytes), str(limits.processor_seconds)],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=handles,
    ) as process:
        try:
            text, _ = process.communicate(json.dumps(rows).encode(), timeout=4 * limits.processor_seconds + 60)
        except subprocess.TimeoutExpired:
            process.kill()
            text = b""
    if process.returncode or not text or len(text) > _LARGEST_ANSWER_BYTES:
        if len(paths) > 1:  # each alone, so that the message names the one that is to blame
            path_of = dict(zip(handles, paths, strict=True))
            return [_ask_child([path_of[row[0]]], [row[0]], [row], limits)[0] for row in rows]
        raise CheckpointError(
            f"{paths[0]} cannot be read: it takes more than {limits.processor_seconds} seconds or "
            f"{limits.memory_bytes} bytes of memory (the reading process ended with {process.returncode}). It is "
            "damaged or was made to do harm."
        )
    return list(json.loads(text))


class _Values:
    """Turns a description into values; entries only refer to entries before them."""

    def __init__(self, path: Path, entries: list[list[Any]]) -> None:
        self._path = path
        self._made: list[Any] = []
        self._plain_tuples: set[int] = set()
        for entry in entries:
            self._made.append(self._value(entry))

    def resolve(self, reference: Any) -> Any:
        return self._made[reference[0]] if isinstance(reference, list) else reference

    def _value(self, entry: list[Any]) -> Any:
        kind, *content = entry
        if kind == "tensor":
            begin, _, dtype, offset, shape, strides = content
            return ForeignTensor(self._path, begin, getattr(torch, dtype), offset, tuple(shape), tuple(strides))
        if kind == "table":
            return self._table(content[0])
        if kind == "object":
            return self._object(*content)
        if kind == "array":
            return ForeignArray(tuple(content[1]), tuple(content[2]))
        if kind == "name":
            dtype = getattr(torch, content[0].removeprefix("torch."), None)
            return dtype if isinstance(dtype, torch.dtype) else content[0]
        if kind == "bytes":
            return bytes.fromhex(content[0])
        values = [self.resolve(item) for item in content[0]]
        if kind == "list":
            return values
        if not any(isinstance(item, list) for item in content[0]):
            self._plain_tuples.add(len(self._made))
        return tuple(values)  # sets, too: their members may not be hashable

    def _object(self, name: str, arguments: Any, state: Any) -> Any:
        given, content = self.resolve(arguments), self.resolve(state)
        if name in NAMESPACES:
            return content if isinstance(content, dict) else {}
        return ForeignObject(name, given, content)

    def _table(self, pairs: list[list[Any]]) -> dict[Any, Any] | ForeignTable:
        keys_are_plain = all(
            not isinstance(key, list) or key[0] in self._plain_tuples for key, _ in pairs
        )  # nested tuples could take for ever to hash
        resolved = tuple((self.resolve(key), self.resolve(value)) for key, value in pairs)
        return dict(resolved) if keys_are_plain else ForeignTable(resolved)


def tensors_in(value: Any, prefix: str = "") -> Iterator[tuple[str, ForeignTensor]]:
    """The tensors in nested dictionaries with their dotted names, in the order of the file."""
    pending: list[tuple[str, Any]] = [(prefix, value)]
    while pending:
        name, current = pending.pop()
        if isinstance(current, ForeignTensor):
            yield name, current
        elif isinstance(current, dict):
            children = [(f"{name}.{key}" if name else str(key), child) for key, child in current.items()]
            pending.extend(reversed(children))
