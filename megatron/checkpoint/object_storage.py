"""Checkpoints in object stores through fsspec, by addresses such as `s3://bucket/run`.

A store has no renames and no partial objects: an object appears when it is closed, and a folder is renamed object by
object, its manifest last; a folder without a manifest is not a checkpoint. There are no links, there is no limit of
free space, and nothing to sync.
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
_FIRST_HANDLE = 1 << 40  # above every file descriptor


def _with_os_errors(call: Callable[..., Result]) -> Callable[..., Result]:
    """Converts every exception of a store's client to `OSError`."""

    @functools.wraps(call)
    def wrapped(*arguments: Any) -> Result:
        try:
            return call(*arguments)
        except (OSError, ConfigError):
            raise
        except Exception as failure:  # no credentials, no connection, ...
            raise OSError(errno.EIO, f"{type(failure).__name__}: {failure}") from failure

    return wrapped


@final
class ObjectStorage:
    """The operations of `storage.Storage` on the stores that fsspec supports; errors are `OSError`, as on a disk."""

    def __init__(self) -> None:
        self._handles = itertools.count(_FIRST_HANDLE)
        self._written: dict[int, Any] = {}
        self._read: dict[int, tuple[Any, str]] = {}
        self._stores: dict[str, Any] = {}

    def owns(self, handle: int) -> bool:
        return handle >= _FIRST_HANDLE

    def make_directories(self, path: Path | int) -> None:
        """A no-op: folders of a store are prefixes of names. The bucket must exist."""

    make_directory = sync_directory = sync = free_bytes = make_directories

    def is_link(self, path: Path) -> bool:
        return False

    @_with_os_errors
    def names(self, path: Path) -> list[str]:
        """The sorted names below a folder; empty for a missing folder."""
        store, location = self._at(path)
        store.invalidate_cache()
        # Not isdir() or exists(), which report nothing if the store refuses or does not respond.
        with contextlib.suppress(FileNotFoundError):
            names = store.ls(location, detail=False)
            return sorted(PurePosixPath(name).name for name in names if name.rstrip("/") != location)
        return []

    @_with_os_errors
    def exists(self, path: Path) -> bool:
        store, location = self._at(path)
        store.invalidate_cache()
        try:
            store.info(location)
        except FileNotFoundError:
            return False
        return True

    @_with_os_errors
    def create(self, path: Path) -> int:
        """Opens a new object for writing."""
        store, location = self._at(path)
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, "it exists", location)
        handle = next(self._handles)
        self._written[handle] = store.open(location, "wb")
        return handle

    @_with_os_errors
    def write(self, handle: int, content: memoryview) -> int:
        return int(self._written[handle].write(bytes(content)))

    @_with_os_errors
    def close(self, handle: int) -> None:
        """Closes an object; one that was written appears now."""
        self._read.pop(handle, None)
        if handle in self._written:
            self._written.pop(handle).close()

    @_with_os_errors
    def rename(self, source: Path, target: Path) -> None:
        """Copies a folder within the store and removes the source: copies the manifest last and removes it first."""
        (store, old), (_, new) = self._at(source), self._at(target)
        if self.exists(target):
            raise FileExistsError(errno.EEXIST, "it exists", new)
        for name in reversed(self._objects(store, old)):
            store.cp_file(name, new + name.removeprefix(old))
        self.remove_tree(source)

    @_with_os_errors
    def remove_tree(self, path: Path) -> None:
        """Removes a folder, its manifest first; a no-op if it is missing."""
        store, location = self._at(path)
        for name in self._objects(store, location):
            store.rm(name)
        if self.exists(path):
            store.rm(location, recursive=True)  # stores with real folders

    @_with_os_errors
    def remove_file(self, path: Path) -> None:
        """Removes an object; a no-op if it is missing."""
        if self.exists(path):
            store, location = self._at(path)
            store.rm(location)

    @_with_os_errors
    def open_to_read(self, path: Path) -> tuple[int, int]:
        """Opens an object; returns a handle and the size in bytes."""
        store, location = self._at(path)
        store.invalidate_cache()
        details = store.info(location)
        if details["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, "it is a folder", location)
        handle = next(self._handles)
        self._read[handle] = store, location
        return handle, int(details["size"])

    @_with_os_errors
    def read_into(self, handle: int, target: memoryview, offset_bytes: int) -> int:
        store, location = self._read[handle]
        content = store.cat_file(location, start=offset_bytes, end=offset_bytes + len(target))
        target[: len(content)] = content
        return len(content)

    def _objects(self, store: Any, location: str) -> list[str]:
        """The objects below a folder, manifests first."""
        store.invalidate_cache()  # and not find(), which reports nothing if the store refuses
        objects = []
        with contextlib.suppress(FileNotFoundError):
            for entry in store.ls(location, detail=True):
                if entry["type"] != "directory":
                    objects.append(entry["name"])
                elif entry["name"].rstrip("/") != location:
                    objects += self._objects(store, entry["name"].rstrip("/"))
        return sorted(objects, key=lambda name: PurePosixPath(name).name != _MANIFEST)

    def _at(self, path: Path) -> tuple[Any, str]:
        """The store of a path that lost a slash to `Path`, and the location in the store."""
        scheme = str(path).partition(":")[0].lower()
        address = _ADDRESS.sub(rf"{scheme}:///" if scheme == "file" else rf"{scheme}://", str(path), count=1)
        if scheme not in self._stores:
            try:
                fsspec = importlib.import_module("fsspec")
                self._stores[scheme] = fsspec.filesystem(scheme)
            except (ImportError, ValueError) as failure:
                raise ConfigError(
                    f"{address} requires fsspec with support for {scheme}:// ({failure}). Install it with pip install "
                    '-e ".[objects]", or use a folder.'
                ) from failure
        return self._stores[scheme], str(self._stores[scheme]._strip_protocol(address)).rstrip("/")
