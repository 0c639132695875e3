"""Atomic replacement of files: write to a temporary name in the same folder, sync, rename.

Only this module syncs and renames.
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
    """A unique temporary name in the folder of `path`, which includes machine and process id.

    Raises:
        ConfigError: the path begins with a `~` that the shell did not expand.
    """
    if path.parts[:1] == ("~",):
        raise ConfigError(f"{path} begins with ~, which the shell did not expand. Use the full path or $HOME.")
    return path.with_name(f".{path.name}.{THIS_MACHINE}-{os.getpid()}-{secrets.token_hex(4)}.tmp")


def remove_leftovers(path: Path) -> list[Path]:
    """Removes and returns the temporary files and folders of `path` left by killed processes of this machine.

    Those of other machines and containers, which may still be running, are kept.
    """
    removed = []
    for name in sorted(_names_in(path.parent)):
        named = re.fullmatch(rf"\.{re.escape(path.name)}\.{THIS_MACHINE}-(\d+)-[0-9a-f]{{8}}\.tmp", name)
        if named is None or is_running(int(named.group(1))):
            continue
        leftover = path.with_name(name)
        try:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        except OSError:  # another run was faster, or the folder is not writable, which the caller will notice
            continue
        removed.append(leftover)
    return removed


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def is_running(process_id: int) -> bool:
    """True if a process of this machine is running."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it belongs to another user
        return True
    return True


def _this_machine() -> str:
    """Eight digits that identify a machine and PID namespace: process ids are comparable only within one."""
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        processes = ""
    return f"{zlib.crc32(f'{platform.node()} {processes}'.encode()):08x}"


THIS_MACHINE = _this_machine()


def check_writable(path: Path) -> None:
    """Checks that a file can be written at `path`, or in the nearest existing parent if folders are missing.

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
    """Replaces a file; like `replace_file`, with a `StorageError`.

    Args:
        content, durable: see `replace_file`.
        needed_bytes: size of the file, for the message about a full disk; None if unknown.

    Raises:
        StorageError: the file system refused; nothing is left behind.
    """
    try:
        replace_file(path, content, durable=durable)
    except OSError as failure:
        raise storage_error(path, failure, needed_bytes) from failure


def write_temporary(path: Path, content: Content, needed_bytes: int | None = None) -> Path:
    """Writes and syncs a file under a temporary name next to `path`; returns that name.

    Args:
        content, needed_bytes: see `write_atomically`.

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
    """Writes a file under a temporary name, syncs it and renames it; removes leftovers of killed runs.

    Args:
        content: the bytes, or a function that writes them.
        durable: if false, do not sync; after a crash of the machine the file may have other content.

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
    """Writes and syncs a new file.

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
    except BaseException:  # including an interrupt
        discard(path)
        raise


def move(source: Path, target: Path, *, durable: bool = True) -> None:
    """Renames a complete file or folder; replaces an existing file atomically.

    Args:
        durable: sync content and name.

    Raises:
        OSError: the file system refused.
    """
    if durable:
        sync_path(source)
    os.replace(source, target)
    if durable:
        _sync_names(target.parent)


def publish_together(files: Sequence[tuple[Path, Path]], removed: Sequence[Path] = ()) -> None:
    """Renames complete files with temporary names in one folder to their final names, in order.

    Existing files are moved aside first, the last one before the others, and restored if a step fails. After a crash in
    between, the last name has no file; the next call removes the leftovers.

    Args:
        files: (temporary name, final name).
        removed: other files to remove with the old ones; may be missing.

    Raises:
        StorageError: the file system refused; the old files are unchanged.
    """
    folder = files[-1][1].parent
    aside: list[tuple[Path, Path]] = []
    placed: list[Path] = []
    try:
        for older in (*(final for _, final in reversed(files)), *removed):
            if older.exists():
                backup = temporary_name(older)
                os.replace(older, backup)
                aside.append((backup, older))
                _sync_names(folder)
        for temporary, final in files:
            if final == files[-1][1]:
                _sync_names(folder)
            os.replace(temporary, final)
            placed.append(final)
    except BaseException as failure:
        for final in placed:
            discard(final)
        for backup, older in reversed(aside):
            with contextlib.suppress(OSError):  # the file keeps its temporary name
                os.replace(backup, older)
        if isinstance(failure, OSError):
            raise storage_error(files[-1][1], failure) from failure
        raise
    _sync_names(folder)
    for backup, _ in aside:
        discard(backup)
    for final in (*(final for _, final in files), *removed):
        remove_leftovers(final)


def discard(temporary: Path) -> None:
    """Removes a file that is no longer needed; failures are ignored."""
    with contextlib.suppress(OSError):
        temporary.unlink()


def sync_file(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_path(path: Path) -> None:
    """Syncs the content of a file, or the names in a folder; ignores file systems that cannot sync folders.

    Raises:
        OSError: the file system refused.
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
    with contextlib.suppress(OSError):  # the rename has happened
        sync_path(folder)


def start_write_back(descriptor: int, start: int, size: int) -> None:
    """Starts writing a byte range of a file to disk without waiting (Linux only), so that the final sync is short."""
    if _SYNC_FILE_RANGE is not None and size:
        _SYNC_FILE_RANGE(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def _sync_file_range() -> Any:
    try:
        return ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None


_SYNC_FILE_RANGE = _sync_file_range()
_SYNC_FILE_RANGE_WRITE = 2
