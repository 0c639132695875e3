"""What is said of a file that the system does not open or write: the path, the reason and the way out."""

from __future__ import annotations

import errno
import resource
import shutil
from pathlib import Path

from megatron.errors import DataError, MegatronError, StorageError, TooManyFilesError


def too_many_files(path: Path, failure: OSError) -> TooManyFilesError:
    """The error for a file that is not opened because too many are; nothing is wrong with the file."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return TooManyFilesError(
        f"Cannot open {path}: {failure.strerror}. This process may have {limit} files open. Raise the limit (ulimit "
        "-n; ulimit -Hn as administrator), or merge some sources with tools/merge_preprocessed_data.py."
    )


def read_error(failure: OSError, path: Path) -> MegatronError:
    """The error for a file of the data that cannot be opened; `path` if the system names none."""
    path = Path(failure.filename or path)
    if failure.errno in (errno.EMFILE, errno.ENFILE):
        return too_many_files(path, failure)
    return DataError(f"Cannot read {path}: {failure.strerror}.")


def storage_error(path: Path, failure: OSError, needed_bytes: int | None = None) -> StorageError:
    """The error for a refused write, with the path, the reason and, where it matters, the free space.

    Args:
        needed_bytes: size of the file, or a lower bound of it; None when unknown.
    """
    reason = failure.strerror or str(failure)
    if failure.errno in (errno.EMFILE, errno.ENFILE):
        return too_many_files(path, failure)
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
