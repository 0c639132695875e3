"""Reads foreign pickles: a child process describes the file, and tensors are read from the file directly."""

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

# A file and a range of it; None for all of it.
RequestedRange = tuple[Path, tuple[int, int] | None]


@dataclass(frozen=True)
class PickleLimits:
    """Resource limits for one file."""

    memory_bytes: int = 4 * 2**30
    processor_seconds: int = 300


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of a foreign file, read lazily; `offset` and `strides` count elements of the storage."""

    path: Path
    start_bytes: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self) -> torch.Tensor:
        """Reads the values, and only the bytes between its first and last element.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if self.numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return self.flat(0, extent).as_strided(self.shape, self.strides)

    def flat(self, first: int, last: int) -> torch.Tensor:
        """Reads elements of the storage, counted from the tensor's first.

        Raises:
            CheckpointError: the file cannot be read.
        """
        values = torch.empty(last - first, dtype=self.dtype)
        offset_bytes = self.start_bytes + (self.offset + first) * self.dtype.itemsize
        try:
            with opened(DISK, self.path) as (handle, _):
                read_range(DISK, handle, values.view(torch.uint8).numpy().data, offset_bytes)
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
    """A dictionary with other keys than numbers and strings, as pairs."""

    pairs: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, eq=False)
class ForeignArray:
    """The numbers of a numpy array, row-major."""

    shape: tuple[int, ...]
    numbers: tuple[float, ...]


def read_pickle(path: Path, limits: PickleLimits | None = None) -> Any:
    """Reads a file of torch.save or pickle.

    Returns dictionaries, lists, tuples, numbers, strings and bytes unchanged; an `argparse.Namespace` becomes a
    dictionary, a tensor a `ForeignTensor`, a numpy array a `ForeignArray`, an object of Megatron or DeepSpeed a
    `ForeignObject`.

    Raises:
        CheckpointError: the file contains anything else, is damaged, or exceeds a limit.
        StorageError: it cannot be opened.
    """
    return read_pickles([path], limits)[0]


def read_pickles(paths: Sequence[Path], limits: PickleLimits | None = None) -> list[Any]:
    """Reads several files; many of them share a child process.

    Raises:
        as `read_pickle`.
    """
    contents: list[Any] = []
    for first in range(0, len(paths), _FILES_PER_CHILD):
        batch = [(path, None) for path in paths[first : first + _FILES_PER_CHILD]]
        contents += _read(batch, limits or PickleLimits())
    return contents


def read_ranges(path: Path, ranges: Sequence[tuple[int, int]], limits: PickleLimits | None = None) -> list[Any]:
    """Reads byte ranges of a file.

    Raises:
        as `read_pickle`.
    """
    return _read([(path, bounds) for bounds in ranges], limits or PickleLimits())


def _read(ranges: Sequence[RequestedRange], limits: PickleLimits) -> list[Any]:
    values = []
    for (path, _), description in zip(ranges, described_ranges(ranges, limits), strict=True):
        if "refused" in description:
            raise CheckpointError(
                f"{path} is refused: {description['refused']}. Only tensors, numbers, strings and containers of them "
                "are read from files of other programs; nothing in them is executed."
            )
        values.append(_Values(path, description["entries"]).resolve(description["value"]))
    return values


def described_ranges(ranges: Sequence[RequestedRange], limits: PickleLimits) -> list[dict[str, Any]]:
    """The child's description of each range of a file, or {"refused": reason}.

    Raises:
        CheckpointError: a range is not in its file, or the child exceeded a limit.
        StorageError: a file cannot be opened.
    """
    rows, handles = [], {}
    with contextlib.ExitStack() as closing:
        for path, bounds in ranges:
            if path not in handles:
                try:
                    handles[path] = closing.enter_context(opened(DISK, path))
                except OSError as failure:
                    raise unreadable(path, failure) from failure
            handle, size_bytes = handles[path]
            start, end = bounds or (0, size_bytes)
            if not 0 <= start < end <= size_bytes:
                raise CheckpointError(
                    f"bytes {start} to {end} of {path} are required, but it has {size_bytes}. It is incomplete; copy "
                    "it again."
                )
            rows.append((handle, start, end))
        return _run_child(list(handles), [handle for handle, _ in handles.values()], rows, limits)


def _run_child(
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
        if len(paths) > 1:  # read each alone, so that the message names the right one
            path_of = dict(zip(handles, paths, strict=True))
            return [_run_child([path_of[row[0]]], [row[0]], [row], limits)[0] for row in rows]
        raise CheckpointError(
            f"{paths[0]} cannot be read: it takes more than {limits.processor_seconds} seconds or "
            f"{limits.memory_bytes} bytes of memory (the reading process exited with code {process.returncode}). It "
            "is damaged or malicious."
        )
    return list(json.loads(text))


class _Values:
    """Rebuilds values from a description; entries refer only to earlier entries."""

    def __init__(self, path: Path, entries: list[list[Any]]) -> None:
        self._path = path
        self._values: list[Any] = []
        self._plain_tuples: set[int] = set()
        for entry in entries:
            self._values.append(self._value(entry))

    def resolve(self, reference: Any) -> Any:
        return self._values[reference[0]] if isinstance(reference, list) else reference

    def _value(self, entry: list[Any]) -> Any:
        kind, *content = entry
        if kind == "tensor":
            start, _, dtype, offset, shape, strides = content
            return ForeignTensor(self._path, start, getattr(torch, dtype), offset, tuple(shape), tuple(strides))
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
            self._plain_tuples.add(len(self._values))
        return tuple(values)  # also for sets: their members may be unhashable

    def _object(self, name: str, arguments: Any, state: Any) -> Any:
        given, content = self.resolve(arguments), self.resolve(state)
        if name in NAMESPACES:
            return content if isinstance(content, dict) else {}
        return ForeignObject(name, given, content)

    def _table(self, pairs: list[list[Any]]) -> dict[Any, Any] | ForeignTable:
        keys_are_plain = all(
            not isinstance(key, list) or key[0] in self._plain_tuples for key, _ in pairs
        )  # hashing nested tuples may take exponential time
        resolved = tuple((self.resolve(key), self.resolve(value)) for key, value in pairs)
        return dict(resolved) if keys_are_plain else ForeignTable(resolved)


def tensors_in(value: Any, prefix: str = "") -> Iterator[tuple[str, ForeignTensor]]:
    """The tensors in nested dictionaries with their dotted names, in file order."""
    pending: list[tuple[str, Any]] = [(prefix, value)]
    while pending:
        name, current = pending.pop()
        if isinstance(current, ForeignTensor):
            yield name, current
        elif isinstance(current, dict):
            children = [(f"{name}.{key}" if name else str(key), child) for key, child in current.items()]
            pending.extend(reversed(children))
