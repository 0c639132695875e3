"""Files that appear under their final name only when they are complete.

Every file is written beside its final place under a temporary name, synced, then renamed; a reader never meets half of
one.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from megatron.errors import StorageError


def temporary_beside(path: Path) -> Path:
    """Names a temporary file in the folder of `path` that no other process will choose."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Writes a file through `write` and gives it its name once it is on disk.

    Raises:
        StorageError: the file system refused; nothing is left behind.
    """
    temporary = temporary_beside(path)
    try:
        with temporary.open("xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
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


def storage_error(path: Path, failure: OSError) -> StorageError:
    """Turns a refused write into a sentence with the path, the reason and the free space of its disk."""
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        free = "its folder cannot be examined"
    reason = failure.strerror or str(failure)
    return StorageError(
        f"Cannot write {path}: {reason} ({free}). Free some space or choose a folder that can be written."
    )
