"""Files that appear under their final name only when they are complete.

Every file is written beside its final place under a temporary name, synced, then renamed; a reader never sees half of
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megatron.errors import ConfigError, StorageError


def temporary_beside(path: Path) -> Path:
    """Names a temporary file in the folder of `path` that no other process will choose; says whose it is.

    Raises:
        ConfigError: the path begins with a `~` that no shell has expanded, and would make a folder of that name.
    """
    if path.parts[:1] == ("~",):
        raise ConfigError(f"{path} begins with ~, which the shell did not expand. Write the folder out, or $HOME.")
    return path.with_name(f".{path.name}.{THIS_MACHINE}-{os.getpid()}-{secrets.token_hex(4)}.tmp")


def remove_leftovers(path: Path) -> list[Path]:
    """Removes the temporary files (and folders) of `path` that processes of this machine left when they were killed.

    One is kept unless its process is known to be gone: another machine or container may still be writing it.

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
        except OSError:  # another run was faster, or the folder cannot be written, which the work itself will report
            continue
        removed.append(leftover)
    return removed


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def is_running(process_id: int) -> bool:
    """Whether a process of this machine is running."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it belongs to another user
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
    """Checks that a file could be written at `path`, before the work whose result it will hold. Missing folders are not
    made yet: the nearest existing one above them must accept a file.

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


def write_atomically(
    path: Path, write: Callable[[BinaryIO], None], needed_bytes: int | None = None, *, durable: bool = True
) -> None:
    """Writes a file through `write` and renames it into place once it is on disk.

    Args:
        durable: false does not wait for the disk; a crash of the machine may then leave the name with other content.
        needed_bytes: size of the file, for the message of a full disk; None when unknown.

    Raises:
        StorageError: the file system refused; nothing is left behind.
    """
    temporary = write_temporary(path, write, needed_bytes, durable=durable)
    try:
        temporary.replace(path)
        if durable:
            sync_directory(path.parent)
    except OSError as failure:
        raise storage_error(path, failure, needed_bytes) from failure
    finally:
        discard(temporary)


def write_temporary(
    path: Path, write: Callable[[BinaryIO], None], needed_bytes: int | None = None, *, durable: bool = True
) -> Path:
    """Writes the contents of a file through `write` under a temporary name beside it, and syncs them.

    Args:
        needed_bytes, durable: see `write_atomically`.

    Returns:
        the temporary name.

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
    except BaseException as failure:
        discard(temporary)
        if isinstance(failure, OSError):
            raise storage_error(path, failure, needed_bytes) from failure
        raise
    return temporary


def publish_together(files: Sequence[tuple[Path, Path]], removed: Sequence[Path] = ()) -> None:
    """Renames complete files, which have temporary names in one folder, to their final names, in order. Older files of
    these names are moved aside first, the last one before the others, and restored if a step fails. A crash in between
    leaves the last name without a file.

    Args:
        files: (temporary name, final name).
        removed: files to remove together with the older ones; they need not exist.

    Raises:
        StorageError: the file system refused; the older files are as they were.
    """
    folder = files[-1][1].parent
    aside: list[tuple[Path, Path]] = []
    placed: list[Path] = []
    try:
        for older in (*(final for _, final in reversed(files)), *removed):
            if older.exists():
                place = temporary_beside(older)
                older.replace(place)
                aside.append((place, older))
                sync_directory(folder)
        for temporary, final in files:
            if final == files[-1][1]:
                sync_directory(folder)
            temporary.replace(final)
            placed.append(final)
    except BaseException as failure:
        for final in placed:
            discard(final)
        for place, older in reversed(aside):
            with contextlib.suppress(OSError):  # the file keeps its temporary name, which is better than losing it
                place.replace(older)
        if isinstance(failure, OSError):
            raise storage_error(files[-1][1], failure) from failure
        raise
    sync_directory(folder)
    for place, _ in aside:
        discard(place)


def discard(temporary: Path) -> None:
    """Removes a file that is no longer needed; a failure to remove it is not reported."""
    with contextlib.suppress(OSError):
        temporary.unlink()


def sync_directory(directory: Path) -> None:
    """Makes renames and removals in a folder durable; file systems that cannot sync a folder are ignored."""
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
    """Asks the system to begin writing a range of a file to disk now (Linux only), without waiting, so that a sync at
    the end finds little left to do.

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


def storage_error(path: Path, failure: OSError, needed_bytes: int | None = None) -> StorageError:
    """The error for a refused write, with the path, the reason and, where it matters, the free space.

    Args:
        needed_bytes: size of the file, or a lower bound of it; None when unknown.
    """
    reason = failure.strerror or str(failure)
    if failure.errno == errno.EISDIR:
        return StorageError(f"Cannot write {path}: {reason}. Give the path of a file.")
    if failure.errno == errno.EIO:
        return StorageError(f"Cannot write {path}: {reason}. The disk or its connection fails: use another one.")
    if failure.errno not in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"Cannot write {path}: {reason}. Choose a folder that can be written.")
    need = "" if needed_bytes is None else f"it takes at least {needed_bytes:,} bytes, "
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        free = "its folder cannot be examined"
    return StorageError(
        f"Cannot write {path}: {reason} ({need}{free}). Free some space or choose a folder on another disk."
    )
