"""Errors for files that cannot be opened or written."""

from __future__ import annotations

import errno
import resource
import shutil
from pathlib import Path

from megatron.errors import DataError, MegatronError, StorageError, TooManyFilesError


def too_many_files(path: Path, failure: OSError) -> TooManyFilesError:
    """The error for a file that cannot be opened because too many files are open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return TooManyFilesError(
        f"Cannot open {path}: {failure.strerror}. The limit for this process is {limit} open files. Raise it (ulimit "
        "-n; ulimit -Hn as administrator), or merge some sources with tools/merge_preprocessed_data.py."
    )


def read_error(failure: OSError, path: Path) -> MegatronError:
    """The error for a data file that cannot be opened; `path` is used if `failure` has no file name."""
    path = Path(failure.filename or path)
    if failure.errno in (errno.EMFILE, errno.ENFILE):
        return too_many_files(path, failure)
    return DataError(f"Cannot read {path}: {failure.strerror}.")


def storage_error(path: Path, failure: OSError, needed_bytes: int | None = None) -> StorageError:
    """The error for a failed write, with path, reason and, for a full disk, the free space.

    Args:
        needed_bytes: size of the file, or a lower bound; None if unknown.
    """
    reason = failure.strerror or str(failure)
    if failure.errno in (errno.EMFILE, errno.ENFILE):
        return too_many_files(path, failure)
    if failure.errno == errno.EISDIR:
        return StorageError(f"Cannot write {path}: {reason}. Use the path of a file.")
    if failure.errno == errno.EIO:
        return StorageError(f"Cannot write {path}: {reason}. The disk or its connection failed: use another one.")
    if failure.errno not in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"Cannot write {path}: {reason}. Use a writable folder.")
    need = "" if needed_bytes is None else f"needs at least {needed_bytes:,} bytes, "
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free"
    except OSError:
        free = "free space is unknown"
    return StorageError(f"Cannot write {path}: {reason} ({need}{free}). Free some space or use another disk.")
