"""Every file operation on checkpoints, in one small class, so that a test can make any of them fail.

Methods raise `OSError` as the operating system does; their callers turn it into typed errors.
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

# Errors of the operating system that concern this process, not the file: an older checkpoint would not help.
_NOT_THE_FILE = ("EACCES", "EPERM", "EMFILE", "ENFILE", "ENOMEM")


class Storage:
    """The real file system. Reads never follow a symbolic link and never open anything but a plain file."""

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def make_directories(self, path: Path) -> None:
        """Makes a directory and those above it, where they are missing."""
        missing = [place for place in (path, *path.parents) if not place.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for place in missing:
            self.sync_directory(place.parent)

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def is_link(self, path: Path) -> bool:
        return os.path.islink(path)

    def make_link(self, path: Path, target: str) -> None:
        """Makes a symbolic link that must not exist yet."""
        os.symlink(target, path)

    def link_target(self, path: Path) -> str:
        """What a symbolic link leads to, as it was written."""
        return os.readlink(path)

    def taken_bytes(self, path: Path) -> int:
        """Bytes of the disk that the plain files of a directory take; holes in them take none."""
        with os.scandir(path) as entries:
            sizes = [
                entry.stat(follow_symlinks=False).st_blocks for entry in entries if entry.is_file(follow_symlinks=False)
            ]
        return 512 * sum(sizes)

    def create(self, path: Path) -> int:
        """Opens a file for writing that must not exist yet."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, content: memoryview) -> int:
        """Writes some of the bytes and returns how many."""
        return os.write(handle, content)

    def sync(self, handle: int) -> None:
        """Waits until the file's content is on the disk."""
        sync_file(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def sync_directory(self, path: Path) -> None:
        sync_path(path)

    def rename(self, source: Path, target: Path) -> None:
        """Renames; a file at the target is replaced in one step, a directory there must not exist."""
        move(source, target, durable=False)

    def remove_tree(self, path: Path) -> None:
        """Removes a directory and everything in it; a missing one is fine."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def remove_file(self, path: Path) -> None:
        """Removes a file; a missing one is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def free_bytes(self, path: Path) -> int | None:
        """Bytes this user can still write there, or None where the file system does not say."""
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize if figures.f_blocks else None

    def open_to_read(self, path: Path) -> tuple[int, int]:
        """Opens a plain file and returns its handle and its size in bytes."""
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(handle)
        if (kind := kind_of(status.st_mode)) is not None:
            os.close(handle)
            raise OSError(errno.EINVAL, f"it is {kind}, and no plain file", str(path))
        return handle, status.st_size

    def read_into(self, handle: int, target: memoryview, offset_bytes: int) -> int:
        """Reads from an offset of a file into `target` and returns how many bytes came (0 at the end)."""
        if hasattr(os, "preadv"):
            return os.preadv(handle, [target], offset_bytes)
        content = os.pread(handle, len(target), offset_bytes)
        target[: len(content)] = content
        return len(content)


@final
class _Places(Storage):
    """Folders on disks and addresses in object stores: each path, and each file opened by it, where it belongs."""

    def __init__(self) -> None:
        self._objects = ObjectStorage()
        for name in set(vars(Storage)) & set(dir(ObjectStorage)):
            if not name.startswith("_"):
                setattr(self, name, functools.partial(self._placed, name))

    def _placed(self, name: str, place: Path | int, *rest: Any) -> Any:
        is_object = self._objects.owns(place) if isinstance(place, int) else is_address(place)
        return getattr(self._objects if is_object else super(), name)(place, *rest)


DISK = _Places()


@contextlib.contextmanager
def opened(storage: Storage, path: Path) -> Iterator[tuple[int, int]]:
    """Opens a plain file for reading and closes it again; yields (handle, size in bytes)."""
    handle, size_bytes = storage.open_to_read(path)
    try:
        yield handle, size_bytes
    finally:
        storage.close(handle)


def read_range(storage: Storage, handle: int, target: memoryview, offset_bytes: int) -> None:
    """Fills `target` with the bytes of a file from an offset on; a file that ends too early is an `OSError`."""
    done = exact.read_into(lambda rest, done: storage.read_into(handle, rest, offset_bytes + done), target)
    if done < len(target):
        raise OSError(errno.EIO, f"the file ends at byte {offset_bytes + done}")


def read_head(storage: Storage, path: Path, most_bytes: int) -> bytes:
    """The first bytes of a plain file, all of them if there are no more."""
    with opened(storage, path) as (handle, size_bytes):
        content = bytearray(min(size_bytes, most_bytes))
        read_range(storage, handle, memoryview(content), 0)
        return bytes(content)


def read_tail(storage: Storage, path: Path, most_bytes: int) -> bytes:
    """The last bytes of a plain file, all of them if there are no more."""
    with opened(storage, path) as (handle, size_bytes):
        content = bytearray(min(size_bytes, most_bytes))
        read_range(storage, handle, memoryview(content), size_bytes - len(content))
        return bytes(content)


def append(storage: Storage, handle: int, content: memoryview) -> None:
    """Writes all bytes at the end of a file."""
    exact.write_all(lambda rest, _: storage.write(handle, rest), content)


def write_file(storage: Storage, path: Path, content: bytes) -> None:
    """Writes a new file and waits until it is on the disk."""
    handle = storage.create(path)
    try:
        append(storage, handle, memoryview(content))
        storage.sync(handle)
    finally:
        storage.close(handle)


@contextlib.contextmanager
def writing(storage: Storage, path: Path, need_bytes: int, flag: str = "--save") -> Iterator[int]:
    """Opens a new file for a block that writes it; when the block has ended, the file is on the disk.

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
    """Writes a new file of UTF-8 text and waits until it is on the disk.

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
    space = "an unknown number of" if free is None else str(free)
    advice = f"Free space there or give {flag} another directory."
    if failure.errno == errno.ENOENT:
        advice = f"All nodes must see the same {flag} directory; give one that is shared."
    elif failure.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        advice = f"Make it writable for this user, or give {flag} another directory."
    elif failure.errno == errno.EFBIG:
        advice = "Files of this process may not be so large: raise its limit (ulimit -f)."
    return StorageError(
        f"cannot write {path}: {failure.strerror or failure} ({name}); this file needs {need_bytes} bytes, {space} "
        f"bytes are free there. Earlier checkpoints are untouched. {advice}"
    )


def unreadable(path: Path, failure: OSError) -> CheckpointError | StorageError:
    """The error for a file that the system did not let us read: damage, or a problem of this process."""
    name = errno.errorcode.get(failure.errno or 0)
    if name in _NOT_THE_FILE:
        return StorageError(
            f"cannot read {path}: {failure.strerror} ({name}). "
            "The file may be good; give this user the right or the resource and start again."
        )
    return DamagedError(f"cannot read {path}: {failure.strerror or failure}. Use another checkpoint.")
