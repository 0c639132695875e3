"""A file system in memory, for checkpoints: thousands of states of a disk are made and read in seconds."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.storage import Storage

Tree = dict[str, Any]
"""A directory: bytes or a bytearray for a file, another tree for a directory, a path for a symbolic link."""


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


class MemoryStorage(Storage):
    """Keeps a tree of files; paths are those below `root`.

    Args:
        tree: what the disk holds; it is changed.
    """

    def __init__(self, root: Path, tree: Tree) -> None:
        self._root = root
        self._tree = tree
        self._open: dict[int, bytes | bytearray] = {}
        self._handles = itertools.count(1)

    def _node(self, path: Path) -> Any:
        node: Any = self._tree
        for name in path.relative_to(self._root).parts:
            if not isinstance(node, dict):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
            if name not in node:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            node = node[name]
        return node

    def _folder(self, path: Path) -> Tree:
        node = self._node(path)
        if not isinstance(node, dict):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        return node

    def make_directory(self, path: Path) -> None:
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        self._folder(path.parent)[path.name] = {}

    def make_directories(self, path: Path) -> None:
        if path != self._root and not self.exists(path):
            self.make_directories(path.parent)
            self.make_directory(path)

    def names(self, path: Path) -> list[str]:
        return sorted(self._folder(path))

    def exists(self, path: Path) -> bool:
        try:
            self._node(path)
        except OSError:
            return False
        return True

    def is_link(self, path: Path) -> bool:
        return self.exists(path) and isinstance(self._node(path), Link)

    def taken_bytes(self, path: Path) -> int:
        return sum(len(node) for node in self._folder(path).values() if isinstance(node, bytes | bytearray))

    def create(self, path: Path) -> int:
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        handle = next(self._handles)
        self._open[handle] = self._folder(path.parent)[path.name] = bytearray()
        return handle

    def write(self, handle: int, content: memoryview) -> int:
        file = self._open[handle]
        assert isinstance(file, bytearray)
        file += content
        return len(content)

    def sync(self, handle: int) -> None:
        pass

    def close(self, handle: int) -> None:
        del self._open[handle]

    def sync_directory(self, path: Path) -> None:
        pass

    def rename(self, source: Path, target: Path) -> None:
        node = self._node(source)
        there = self._folder(target.parent).get(target.name)
        if isinstance(there, dict) and there:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(target))
        del self._folder(source.parent)[source.name]
        self._folder(target.parent)[target.name] = node

    def remove_tree(self, path: Path) -> None:
        if isinstance(self._folder(path.parent).get(path.name, {}), dict):
            self._folder(path.parent).pop(path.name, None)

    def remove_file(self, path: Path) -> None:
        self._folder(path.parent).pop(path.name, None)

    def free_bytes(self, path: Path) -> int | None:
        return None

    def open_to_read(self, path: Path) -> tuple[int, int]:
        node = self._node(path)
        if not isinstance(node, bytes | bytearray):
            raise OSError(errno.ELOOP if isinstance(node, Link) else errno.EINVAL, "not a plain file", str(path))
        handle = next(self._handles)
        self._open[handle] = node
        return handle, len(node)

    def read_into(self, handle: int, target: memoryview, offset_bytes: int) -> int:
        content = self._open[handle][offset_bytes : offset_bytes + len(target)]
        target[: len(content)] = content
        return len(content)


@dataclass(frozen=True)
class Operation:
    """One change of a disk: what is done to which name (relative to the root), what goes with it, and when (in ns)."""

    name: str
    path: str
    target: str = ""
    content: bytes = b""
    at: int = 0


@dataclass
class RecordingStorage(Storage):
    """Does everything on the real disk, and writes down what changes it."""

    root: Path
    log: list[Operation] = field(default_factory=list)
    _open: dict[int, str] = field(default_factory=dict)

    def _note(self, name: str, path: Path | str, target: Path | None = None, content: bytes = b"") -> None:
        shown = path if isinstance(path, str) else str(path.relative_to(self.root))
        end = "" if target is None else str(target.relative_to(self.root))
        self.log.append(Operation(name, shown, end, content, time.monotonic_ns()))

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self._note("mkdir", path)

    def create(self, path: Path) -> int:
        handle = super().create(path)
        self._open[handle] = str(path.relative_to(self.root))
        self._note("create", path)
        return handle

    def write(self, handle: int, content: memoryview) -> int:
        count = super().write(handle, content)
        self._note("write", self._open[handle], content=bytes(content[:count]))
        return count

    def sync(self, handle: int) -> None:
        self._note("sync", self._open[handle])

    def sync_directory(self, path: Path) -> None:
        if path != self.root.parent:
            self._note("sync directory", path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._note("rename", source, target)

    def remove_file(self, path: Path) -> None:
        if self.exists(path):
            self._note("unlink", path)
        super().remove_file(path)

    def remove_tree(self, path: Path) -> None:
        if not self.exists(path):
            return
        for file in sorted(path.iterdir()):
            self._note("unlink", file)
        self._note("rmdir", path)
        super().remove_tree(path)


def frozen(tree: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A tree as a value that can be compared and hashed."""
    return tuple(
        sorted(
            (name, frozen(node) if isinstance(node, Mapping) else node if isinstance(node, Link) else bytes(node))
            for name, node in tree.items()
        )
    )
