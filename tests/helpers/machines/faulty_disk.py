"""A disk that refuses the k-th operation that changes it, for what this process and its forked children do in a folder.

Python's files and the calls of `os` are replaced; what a C library writes by itself is not seen.
"""

from __future__ import annotations

import builtins
import errno
import io
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NEEDS_SPACE = ("create", "write", "truncate", "copy", "mkdir")


class FaultyDisk:
    """Counts the operations in a folder, in all processes together, and refuses one.

    Args:
        fail_at: which operation, from 0; None refuses none.
        number: with which error.
        is_full: every later operation that needs space is refused as well.
        is_short: writes take only a part of what they are given.
        kills: the process dies by SIGKILL before the operation instead; removals and links count, too.
    """

    def __init__(
        self,
        folder: Path,
        fail_at: int | None = None,
        number: int = errno.ENOSPC,
        is_full: bool = False,
        is_short: bool = False,
        kills: bool = False,
    ) -> None:
        self._folder = os.path.realpath(folder) + os.sep
        self._fail_at, self._number, self._is_full = fail_at, number, is_full
        self.is_short, self.kills = is_short, kills
        self._count = multiprocessing.Value("q", 0)

    @property
    def operations(self) -> int:
        """How many there were."""
        return int(self._count.value)

    def step(self, name: str, place: Any) -> None:
        """Counts an operation on a path or a descriptor."""
        path = _path_of(place)
        if path is None or not (path + os.sep).startswith(self._folder) or path + os.sep == self._folder:
            return
        with self._count.get_lock():
            here = self._count.value
            self._count.value += 1
        if self._fail_at is None or here < self._fail_at:
            return
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if here == self._fail_at or (self._is_full and name in _NEEDS_SPACE):
            raise OSError(self._number, os.strerror(self._number), path)

    def taken(self, data: Any) -> Any:
        """What a write takes of its data."""
        view = memoryview(data).cast("B")
        return view[: max(1, len(view) // 2)] if self.is_short and len(view) > 1 else view


@contextmanager
def faulty_disk(disk: FaultyDisk) -> Iterator[FaultyDisk]:
    """Puts a disk in the place of the real one for a while."""
    with pytest.MonkeyPatch.context() as patch:
        opened = _opener(disk, io.open)
        patch.setattr(builtins, "open", opened)
        patch.setattr(io, "open", opened)
        for name in ("write", "pwrite"):
            patch.setattr(os, name, _writing(disk, getattr(os, name)))
        for name, step, place in (
            ("fsync", "sync", 0), ("replace", "rename", 1), ("rename", "rename", 1), ("link", "create", 1),
            ("mkdir", "mkdir", 0), ("ftruncate", "truncate", 0), ("truncate", "truncate", 0),
            ("copy_file_range", "copy", 1), ("sendfile", "copy", 0), ("posix_fallocate", "truncate", 0),
        ):  # fmt: skip
            if hasattr(os, name):
                # a sync does nothing: power failures are not simulated
                real = getattr(os, name) if step != "sync" else lambda descriptor: None
                patch.setattr(os, name, _stepping(disk, step, place, real))
        for name in ("unlink", "remove", "rmdir", "symlink") if disk.kills else ():
            patch.setattr(os, name, _removing(disk, 1 if name == "symlink" else 0, getattr(os, name)))
        patch.setattr(os, "open", _creating(disk, os.open))
        yield disk


class _File(io.FileIO):
    disk: FaultyDisk

    def write(self, data: Any) -> int:
        self.disk.step("write", self.fileno())
        return super().write(self.disk.taken(data))

    def truncate(self, size: int | None = None) -> int:
        self.disk.step("truncate", self.fileno())
        return super().truncate(size)


def _opener(disk: FaultyDisk, real: Callable[..., Any]) -> Callable[..., Any]:
    def opened(
        file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None,
        closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        if not set(mode) & set("wxa+"):
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if set(mode) & set("wxa"):
            disk.step("create", file)
        raw = _File(file, "".join(letter for letter in mode if letter not in "bt"), closefd, opener)
        raw.disk = disk
        if "b" in mode and buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        stream = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        return stream if "b" in mode else io.TextIOWrapper(stream, encoding, errors, newline)

    return opened


def _writing(disk: FaultyDisk, real: Callable[..., int]) -> Callable[..., int]:
    def write(descriptor: int, data: Any, *more: Any) -> int:
        path = _path_of(descriptor)
        if path is None or not os.path.isabs(path) or not os.path.isfile(path):
            return real(descriptor, data, *more)
        disk.step("write", descriptor)
        return real(descriptor, disk.taken(data), *more)

    return write


def _stepping(disk: FaultyDisk, name: str, place: int, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*words: Any, **more: Any) -> Any:
        disk.step(name, words[place])
        return real(*words, **more)

    return call


def _removing(disk: FaultyDisk, place: int, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*words: Any, dir_fd: int | None = None) -> Any:
        folder = "" if dir_fd is None else _path_of(dir_fd) or ""
        disk.step("remove", os.path.join(folder, os.fsdecode(words[place])))
        return real(*words, dir_fd=dir_fd)

    return call


def _creating(disk: FaultyDisk, real: Callable[..., int]) -> Callable[..., int]:
    def call(path: Any, flags: int, *words: Any, **more: Any) -> int:
        if flags & os.O_CREAT:
            disk.step("create", path)
        return real(path, flags, *words, **more)

    return call


def _path_of(place: Any) -> str | None:
    if isinstance(place, int):
        try:
            return os.readlink(f"/proc/self/fd/{place}").removesuffix(" (deleted)")
        except OSError:
            return None
    path = os.fsdecode(place)
    return os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))
