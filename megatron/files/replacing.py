"""Files that appear under their final name only when they are complete.

Every file is written next to its final place under a temporary name, synced, then renamed; a reader never sees half of
one. Only this module syncs and renames.
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

from megatron.errors import ConfigError
from megatron.files.failures import storage_error

Content = bytes | Callable[[BinaryIO], object]


def temporary_name(path: Path) -> Path:
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
        named = re.fullmatch(rf"\.{re.escape(path.name)}\.{THIS_MACHINE}-(\d+)-[0-9a-f]{{8}}\.tmp", name)
        if named is None or is_running(int(named.group(1))):
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
    probe = temporary_name(folder / path.name)
    try:
        probe.open("xb").close()
        probe.unlink()
    except OSError as failure:
        raise storage_error(path, failure) from failure


def write_atomically(path: Path, content: Content, needed_bytes: int | None = None, *, durable: bool = True) -> None:
    """Replaces a file as `replace_file` does.

    Args:
        content, durable: see `replace_file`.
        needed_bytes: size of the file, for the message of a full disk; None when unknown.

    Raises:
        StorageError: the file system refused; nothing is left behind.
    """
    try:
        replace_file(path, content, durable=durable)
    except OSError as failure:
        raise storage_error(path, failure, needed_bytes) from failure


def write_temporary(path: Path, content: Content, needed_bytes: int | None = None) -> Path:
    """Writes the contents of a file under a temporary name next to it, and syncs them.

    Args:
        content, needed_bytes: see `write_atomically`.

    Returns:
        the temporary name.

    Raises:
        StorageError: the file system refused; nothing is left behind.
    """
    temporary = temporary_name(path)
    try:
        write_new(temporary, content)
    except OSError as failure:
        raise storage_error(path, failure, needed_bytes) from failure
    return temporary


def replace_file(path: Path, content: Content, *, durable: bool = True) -> None:
    """Writes a file under a temporary name and renames it into place once it is on the disk; what killed runs left is
    removed.

    Args:
        content: the bytes, or what writes them.
        durable: false does not wait for the disk; a crash of the machine may then leave the name with other content.

    Raises:
        OSError: the file system refused; nothing is left behind.
    """
    temporary = temporary_name(path)
    write_new(temporary, content, durable=durable)
    try:
        os.replace(temporary, path)
        if durable:
            _sync_names(path.parent)
    finally:
        discard(temporary)
    remove_leftovers(path)


def write_new(path: Path, content: Content, *, durable: bool = True) -> None:
    """Writes a file that must not exist yet, and syncs it.

    Args:
        content, durable: see `replace_file`.

    Raises:
        OSError: the file system refused; nothing is left behind.
    """
    try:
        with path.open("xb") as stream:
            if isinstance(content, bytes):
                stream.write(content)
            else:
                content(stream)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
    except FileExistsError:
        raise
    except BaseException:  # an interrupt, too, as soon as the file is there
        discard(path)
        raise


def move(source: Path, target: Path, *, durable: bool = True) -> None:
    """Gives a complete file or folder another name; a file of that name is replaced in one step.

    Args:
        durable: false does not wait until the content and the new name are on the disk.

    Raises:
        OSError: the file system refused.
    """
    if durable:
        sync_path(source)
    os.replace(source, target)
    if durable:
        _sync_names(target.parent)


def publish_together(files: Sequence[tuple[Path, Path]], removed: Sequence[Path] = ()) -> None:
    """Renames complete files, which have temporary names in one folder, to their final names, in order. Older files of
    these names are moved aside first, the last one before the others, and restored if a step fails. A crash in between
    leaves the last name without a file; the next call removes what it left.

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
                place = temporary_name(older)
                os.replace(older, place)
                aside.append((place, older))
                _sync_names(folder)
        for temporary, final in files:
            if final == files[-1][1]:
                _sync_names(folder)
            os.replace(temporary, final)
            placed.append(final)
    except BaseException as failure:
        for final in placed:
            discard(final)
        for place, older in reversed(aside):
            with contextlib.suppress(OSError):  # the file keeps its temporary name, which is better than losing it
                os.replace(place, older)
        if isinstance(failure, OSError):
            raise storage_error(files[-1][1], failure) from failure
        raise
    _sync_names(folder)
    for place, _ in aside:
        discard(place)
    for final in (*(final for _, final in files), *removed):
        remove_leftovers(final)


def discard(temporary: Path) -> None:
    """Removes a file that is no longer needed; a failure to remove it is not reported."""
    with contextlib.suppress(OSError):
        temporary.unlink()


def sync_file(descriptor: int) -> None:
    """Waits until the content of an open file is on the disk.

    Raises:
        OSError: the file system refused.
    """
    os.fsync(descriptor)


def sync_path(path: Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on the disk.

    Raises:
        OSError: the file system refused; one that cannot do this for a folder, as some over a network, is not meant.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as failure:
        if failure.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _sync_names(folder: Path) -> None:
    """Syncs a folder after a rename that stands, whatever the disk says now."""
    with contextlib.suppress(OSError):
        sync_path(folder)


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
