"""Checkpoints in object stores, by addresses such as `s3://bucket/run`, through fsspec.

A store has no renames and no half-written objects: an object appears when it is closed, and a folder is renamed object
by object, its manifest last, so that a checkpoint without a manifest is none. There are no links, no free space to ask
for, and nothing to synchronize.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, final

from megatron.errors import ConfigError

Result = TypeVar("Result")
_MANIFEST = "manifest.json"
_ADDRESS = re.compile(r"([A-Za-z][\w+.-]+):/+")
_FIRST_HANDLE = 1 << 40  # no number of an open file


def _with_os_errors(call: Callable[..., Result]) -> Callable[..., Result]:
    """Makes all that a client of a store raises an `OSError`."""

    @functools.wraps(call)
    def wrapped(*arguments: Any) -> Result:
        try:
            return call(*arguments)
        except (OSError, ConfigError):
            raise
        except Exception as failure:  # of the client of a service: no credentials, no connection
            raise OSError(errno.EIO, f"{type(failure).__name__}: {failure}") from failure

    return wrapped


@final
class ObjectStorage:
    """The operations of `storage.Storage` on the stores that fsspec knows; errors are `OSError`, as from a disk."""

    def __init__(self) -> None:
        self._handles = itertools.count(_FIRST_HANDLE)
        self._written: dict[int, Any] = {}
        self._read: dict[int, tuple[Any, str]] = {}
        self._stores: dict[str, Any] = {}

    def owns(self, handle: int) -> bool:
        return handle >= _FIRST_HANDLE

    def make_directories(self, path: Path | int) -> None:
        """Nothing to do: folders of a store are beginnings of names. A bucket must exist."""

    make_directory = sync_directory = sync = free_bytes = make_directories

    def is_link(self, path: Path) -> bool:
        """No: a store has none."""
        return False

    @_with_os_errors
    def names(self, path: Path) -> list[str]:
        """The names below a folder, sorted; none where there is nothing, which is all that a missing folder is."""
        store, place = self._at(path)
        store.invalidate_cache()
        # Not isdir() nor exists(): for them a store that refuses, or does not answer, holds nothing.
        with contextlib.suppress(FileNotFoundError):
            names = store.ls(place, detail=False)
            return sorted(PurePosixPath(name).name for name in names if name.rstrip("/") != place)
        return []

    @_with_os_errors
    def exists(self, path: Path) -> bool:
        """Whether there is an object or a folder of that name."""
        store, place = self._at(path)
        store.invalidate_cache()
        try:
            store.info(place)
        except FileNotFoundError:
            return False
        return True

    @_with_os_errors
    def create(self, path: Path) -> int:
        """Opens an object for writing, which must not exist yet."""
        store, place = self._at(path)
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, "it exists", place)
        handle = next(self._handles)
        self._written[handle] = store.open(place, "wb")
        return handle

    @_with_os_errors
    def write(self, handle: int, content: memoryview) -> int:
        """Writes the bytes, in parts of a few megabytes."""
        return int(self._written[handle].write(bytes(content)))

    @_with_os_errors
    def close(self, handle: int) -> None:
        """Closes an object: one that was written is there afterwards, whole."""
        self._read.pop(handle, None)
        if handle in self._written:
            self._written.pop(handle).close()

    @_with_os_errors
    def rename(self, source: Path, target: Path) -> None:
        """Copies a folder within the store and removes the source; the manifest is copied last and removed first."""
        (store, old), (_, new) = self._at(source), self._at(target)
        if self.exists(target):
            raise FileExistsError(errno.EEXIST, "it exists", new)
        for name in reversed(self._objects(store, old)):
            store.cp_file(name, new + name.removeprefix(old))
        self.remove_tree(source)

    @_with_os_errors
    def remove_tree(self, path: Path) -> None:
        """Removes a folder, its manifest first; a missing one is fine."""
        store, place = self._at(path)
        for name in self._objects(store, place):
            store.rm(name)
        if self.exists(path):
            store.rm(place, recursive=True)  # where folders are real

    @_with_os_errors
    def remove_file(self, path: Path) -> None:
        """Removes an object; a missing one is fine."""
        if self.exists(path):
            store, place = self._at(path)
            store.rm(place)

    @_with_os_errors
    def open_to_read(self, path: Path) -> tuple[int, int]:
        """A handle on an object and its size in bytes."""
        store, place = self._at(path)
        store.invalidate_cache()
        details = store.info(place)
        if details["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, "it is a folder", place)
        handle = next(self._handles)
        self._read[handle] = store, place
        return handle, int(details["size"])

    @_with_os_errors
    def read_into(self, handle: int, target: memoryview, offset_bytes: int) -> int:
        """Reads a range of an object."""
        store, place = self._read[handle]
        content = store.cat_file(place, start=offset_bytes, end=offset_bytes + len(target))
        target[: len(content)] = content
        return len(content)

    def _objects(self, store: Any, place: str) -> list[str]:
        """The objects below a folder, a manifest first; not by find(), for which a store that refuses holds nothing."""
        store.invalidate_cache()
        objects = []
        with contextlib.suppress(FileNotFoundError):
            for entry in store.ls(place, detail=True):
                if entry["type"] != "directory":
                    objects.append(entry["name"])
                elif entry["name"].rstrip("/") != place:
                    objects += self._objects(store, entry["name"].rstrip("/"))
        return sorted(objects, key=lambda name: PurePosixPath(name).name != _MANIFEST)

    def _at(self, path: Path) -> tuple[Any, str]:
        """The store of a path, which `Path` has taken a slash from, and the place in it."""
        scheme = str(path).partition(":")[0].lower()
        address = _ADDRESS.sub(rf"{scheme}:///" if scheme == "file" else rf"{scheme}://", str(path), count=1)
        if scheme not in self._stores:
            try:
                fsspec = importlib.import_module("fsspec")
                self._stores[scheme] = fsspec.filesystem(scheme)
            except (ImportError, ValueError) as failure:
                raise ConfigError(
                    f"{address} needs fsspec with support for {scheme}:// ({failure}). Install it: pip install "
                    '-e ".[objects]"; or give a folder.'
                ) from failure
        return self._stores[scheme], str(self._stores[scheme]._strip_protocol(address)).rstrip("/")
