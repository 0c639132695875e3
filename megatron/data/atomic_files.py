"""Files that appear under their final name only when they are complete.

Every file is written beside its final place under a temporary name, synced, then renamed; a reader never meets half of
one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import secrets
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from megatron.errors import StorageError


def temporary_beside(path: Path) -> Path:
    """Names a temporary file in the folder of `path` that no other process will choose; says whose it is."""
    return path.with_name(f".{path.name}.{THIS_MACHINE}-{os.getpid()}-{secrets.token_hex(4)}.tmp")


def remove_leftovers(path: Path) -> list[Path]:
    """Removes the temporary files (and folders) of `path` that processes of this machine left when they were killed.

    One is left alone unless its process is known to be gone: another machine, or another container, may still be
    writing it.

    Returns:
        what was removed.
    """
    removed = []
    for name in sorted(_names_in(path.parent)):
        found = re.fullmatch(rf"\.{re.escape(path.name)}\.{THIS_MACHINE}-(\d+)-[0-9a-f]{{8}}\.tmp", name)
        if found is None or is_running(int(found.group(1))):
            continue
        leftover = path.with_name(name)
        try:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        except OSError:  # another run was quicker, or the folder cannot be written, which the work itself will say
            continue
        removed.append(leftover)
    return removed


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def is_running(process_id: int) -> bool:
    """Whether a process of this machine lives."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it is somebody else's
        return True
    return True


def _this_machine() -> str:
    """Eight digits that differ between machines and between containers: process ids mean something only inside one."""
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        processes = ""
    return f"{zlib.crc32(f'{platform.node()} {processes}'.encode()):08x}"


THIS_MACHINE = _this_machine()


def check_writable(path: Path) -> None:
    """Checks that a file could be written at `path`, before the work whose result it will hold.

    Folders that are missing are not made yet: then the nearest one above them must take a file.

    Raises:
        StorageError: `path` is a folder, or the file system refuses new files there.
    """
    path = Path(os.path.abspath(path))
    if path.is_dir():
        raise storage_error(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    probe = temporary_beside(folder / path.name)
    try:
        probe.open("xb").close()
        probe.unlink()
    except OSError as failure:
        raise storage_error(path, failure) from failure


def write_atomically(path: Path, write: Callable[[BinaryIO], None], *, durable: bool = True) -> None:
    """Writes a file through `write` and gives it its name once it is on disk.

    Args:
        durable: false does not wait for the disk; a crash of the machine may then leave the name with other content.

    Raises:
        StorageError: the file system refused; nothing is left behind.
    """
    temporary = temporary_beside(path)
    try:
        with temporary.open("xb") as stream:
            write(stream)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        temporary.replace(path)
        if durable:
            sync_directory(path.parent)
    except OSError as failure:
        raise storage_error(path, failure) from failure
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Makes renames and removals in a folder durable; file systems that cannot sync a folder are left alone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        return
    finally:
        os.close(descriptor)


def start_write_back(descriptor: int, start: int, size: int) -> None:
    """Asks the system to begin writing a range of a file to disk now (Linux; nothing elsewhere), without waiting.

    So a sync at the end finds little left to do.

    Args:
        start, size: bytes.
    """
    if _SYNC_FILE_RANGE is not None and size:
        _SYNC_FILE_RANGE(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def _sync_file_range() -> Any:
    try:
        return ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None


_SYNC_FILE_RANGE = _sync_file_range()
_SYNC_FILE_RANGE_WRITE = 2


def storage_error(path: Path, failure: OSError) -> StorageError:
    """Turns a refused write into a sentence with the path and the reason; with the free space where that is one."""
    reason = failure.strerror or str(failure)
    if failure.errno == errno.EISDIR:
        return StorageError(f"Cannot write {path}: {reason}. Give the path of a file.")
    if failure.errno not in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"Cannot write {path}: {reason}. Choose a folder that can be written.")
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        free = "its folder cannot be examined"
    return StorageError(f"Cannot write {path}: {reason} ({free}). Free some space or choose a folder on another disk.")
