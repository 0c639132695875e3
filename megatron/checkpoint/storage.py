"""All file operations on checkpoints in one small class, so that tests can make any of them fail.

Methods raise `OSError` like the operating system; callers convert it to typed errors.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from megatron.checkpoint.object_storage import ObjectStorage
from megatron.config.flags.paths import is_address
from megatron.errors import CheckpointError, DamagedError, StorageError
from megatron.files import exact
from megatron.files.plain import kind_of
from megatron.files.replacing import move, sync_file, sync_path

# Errors that concern this process, not the file: an older checkpoint would not help.
_PROCESS_ERRORS = ("EACCES", "EPERM", "EMFILE", "ENFILE", "ENOMEM")


class Storage:
    """The file systems of the machine. Reads never follow symbolic links and open regular files only."""

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def make_directories(self, path: Path) -> None:
        """Creates a directory and its missing parents."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            self.sync_directory(folder.parent)

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def is_link(self, path: Path) -> bool:
        return os.path.islink(path)

    def make_link(self, path: Path, target: str) -> None:
        os.symlink(target, path)

    def link_target(self, path: Path) -> str:
        return os.readlink(path)

    def taken_bytes(self, path: Path) -> int:
        """Disk space used by the regular files in a directory, without holes."""
        with os.scandir(path) as entries:
            sizes = [
                entry.stat(follow_symlinks=False).st_blocks for entry in entries if entry.is_file(follow_symlinks=False)
            ]
        return 512 * sum(sizes)

    def create(self, path: Path) -> int:
        """Opens a new file for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, content: memoryview) -> int:
        """Writes some of the bytes and returns how many."""
        return os.write(handle, content)

    def sync(self, handle: int) -> None:
        sync_file(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def sync_directory(self, path: Path) -> None:
        sync_path(path)

    def rename(self, source: Path, target: Path) -> None:
        """Renames; replaces an existing file atomically. A target directory must not exist."""
        move(source, target, durable=False)

    def remove_tree(self, path: Path) -> None:
        """Removes a directory recursively; a no-op if it is missing."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def remove_file(self, path: Path) -> None:
        """Removes a file; a no-op if it is missing."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def free_bytes(self, path: Path) -> int | None:
        """Bytes available to this user; None if the file system does not report it."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize if status.f_blocks else None

    def open_to_read(self, path: Path) -> tuple[int, int]:
        """Opens a regular file; returns its handle and its size in bytes."""
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(handle)
        if (kind := kind_of(status.st_mode)) is not None:
            os.close(handle)
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
        return handle, status.st_size

    def read_into(self, handle: int, target: memoryview, offset_bytes: int) -> int:
        """Reads from an offset into `target`; returns the number of bytes read (0 at the end)."""
        if hasattr(os, "preadv"):
            return os.preadv(handle, [target], offset_bytes)
        content = os.pread(handle, len(target), offset_bytes)
        target[: len(content)] = content
        return len(content)


@final
class _Backends(Storage):
    """Dispatches each path or handle to the file system or to an object store."""

    def __init__(self) -> None:
        self._objects = ObjectStorage()
        for name in set(vars(Storage)) & set(dir(ObjectStorage)):
            if not name.startswith("_"):
                setattr(self, name, functools.partial(self._dispatch, name))

    def _dispatch(self, name: str, target: Path | int, *rest: Any) -> Any:
        is_object = self._objects.owns(target) if isinstance(target, int) else is_address(target)
        return getattr(self._objects if is_object else super(), name)(target, *rest)


DISK = _Backends()


@contextlib.contextmanager
def opened(storage: Storage, path: Path) -> Iterator[tuple[int, int]]:
    """Opens a regular file for reading; yields (handle, size in bytes)."""
    handle, size_bytes = storage.open_to_read(path)
    try:
        yield handle, size_bytes
    finally:
        storage.close(handle)


def read_range(storage: Storage, handle: int, target: memoryview, offset_bytes: int) -> None:
    """Fills `target` with the bytes of a file from an offset; raises `OSError` if the file is too short."""
    done = exact.read_into(lambda rest, done: storage.read_into(handle, rest, offset_bytes + done), target)
    if done < len(target):
        raise OSError(errno.EIO, f"the file ends at byte {offset_bytes + done}")


def read_head(storage: Storage, path: Path, most_bytes: int) -> bytes:
    """The first bytes of a regular file, at most `most_bytes`."""
    with opened(storage, path) as (handle, size_bytes):
        content = bytearray(min(size_bytes, most_bytes))
        read_range(storage, handle, memoryview(content), 0)
        return bytes(content)


def read_tail(storage: Storage, path: Path, most_bytes: int) -> bytes:
    """The last bytes of a regular file, at most `most_bytes`."""
    with opened(storage, path) as (handle, size_bytes):
        content = bytearray(min(size_bytes, most_bytes))
        read_range(storage, handle, memoryview(content), size_bytes - len(content))
        return bytes(content)


def append(storage: Storage, handle: int, content: memoryview) -> None:
    exact.write_all(lambda rest, _: storage.write(handle, rest), content)


def write_file(storage: Storage, path: Path, content: bytes) -> None:
    """Writes and syncs a new file."""
    handle = storage.create(path)
    try:
        append(storage, handle, memoryview(content))
        storage.sync(handle)
    finally:
        storage.close(handle)


@contextlib.contextmanager
def writing(storage: Storage, path: Path, need_bytes: int, flag: str = "--save") -> Iterator[int]:
    """Opens a new file for writing; syncs and closes it at the end of the block.

    Raises:
        StorageError: the file system refused; see `cannot_write`.
    """
    try:
        handle = storage.create(path)
        try:
            yield handle
            storage.sync(handle)
        finally:
            storage.close(handle)
    except OSError as failure:
        raise cannot_write(storage, path, need_bytes, failure, flag) from failure


def write_text(path: Path, text: str, storage: Storage = DISK) -> None:
    """Writes and syncs a new UTF-8 text file.

    Raises:
        StorageError: the file system refused.
    """
    content = text.encode()
    with writing(storage, path, len(content)) as handle:
        append(storage, handle, memoryview(content))


def cannot_write(storage: Storage, path: Path, need_bytes: int, failure: OSError, flag: str = "--save") -> StorageError:
    """The error for a write that the file system refused; `flag` names the directory."""
    try:
        free = storage.free_bytes(path.parent)
    except OSError:
        free = None
    name = errno.errorcode.get(failure.errno or 0, "unknown error")
    space = "unknown" if free is None else f"{free} bytes"
    advice = f"Free some space or use another {flag} directory."
    if failure.errno == errno.ENOENT:
        advice = f"The {flag} directory must be shared by all nodes."
    elif failure.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        advice = f"Make it writable for this user, or use another {flag} directory."
    elif failure.errno == errno.EFBIG:
        advice = "The file exceeds this process's size limit: raise it (ulimit -f)."
    return StorageError(
        f"cannot write {path}: {failure.strerror or failure} ({name}); the file needs {need_bytes} bytes, free space: "
        f"{space}. Earlier checkpoints are intact. {advice}"
    )


def unreadable(path: Path, failure: OSError) -> CheckpointError | StorageError:
    """The error for a file that cannot be read: damage, or a problem of this process."""
    name = errno.errorcode.get(failure.errno or 0)
    if name in _PROCESS_ERRORS:
        return StorageError(
            f"cannot read {path}: {failure.strerror} ({name}). "
            "The file may be valid; grant this user the permission or resource and start again."
        )
    return DamagedError(f"cannot read {path}: {failure.strerror or failure}. Use another checkpoint.")
