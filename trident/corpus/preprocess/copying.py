"""Copies a stretch of one file into another at the disk's speed and with constant memory.

The system copies (`copy_file_range`, which may share blocks instead of copying them, else `sendfile`); where it cannot,
this process reads and writes. Holes of a sparse file stay holes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from megatron.files.exact import write_at

_READ_BYTES = 1 << 22
_CALL_BYTES = 1 << 30
# What a system answers when it has no such call, or not between these two files.
_CANNOT = frozenset(
    {errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF, errno.EPERM, errno.ETXTBSY}
)


def copy_into(source: int, target: int, size: int, target_offset: int) -> int:
    """Copies the first `size` bytes of a file to a place inside another; holes of the source are left out.

    Args:
        source: descriptor, readable.
        target: descriptor, writable; bytes of the place that are not written yet must read as 0.
        size: bytes to copy.
        target_offset: where they go.

    Returns:
        How far into the source it came; less than `size` when the source is shorter.
    """
    reached = 0
    for start, stop in _stretches(source, size):
        reached = start
        while reached < stop:
            count = _copy_some(source, target, min(stop - reached, _CALL_BYTES), reached, target_offset + reached)
            if count == 0:
                return reached
            reached += count
    return min(size, os.fstat(source).st_size)


def _stretches(source: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a file's first `size` bytes that hold data."""
    start = 0
    while start < size:
        try:
            first = os.lseek(source, start, os.SEEK_DATA)
            stop = os.lseek(source, first, os.SEEK_HOLE)
        except OSError as failure:
            if failure.errno == errno.ENXIO:  # nothing but a hole up to the end
                return
            yield start, size
            return
        except AttributeError:  # a system that cannot tell
            yield start, size
            return
        if first < size:
            yield first, min(stop, size)
        start = stop


def _copy_some(source: int, target: int, size: int, source_offset: int, target_offset: int) -> int:
    """Copies at least one byte by the first way that works; 0 at the end of the source."""
    for copy in (_by_copy_file_range, _by_sendfile):
        try:
            return copy(source, target, size, source_offset, target_offset)
        except AttributeError:
            continue
        except OSError as failure:
            if failure.errno not in _CANNOT:
                raise
    return _by_hand(source, target, size, source_offset, target_offset)


def _by_copy_file_range(source: int, target: int, size: int, source_offset: int, target_offset: int) -> int:
    return os.copy_file_range(source, target, size, source_offset, target_offset)


def _by_sendfile(source: int, target: int, size: int, source_offset: int, target_offset: int) -> int:
    os.lseek(target, target_offset, os.SEEK_SET)
    return os.sendfile(target, source, source_offset, size)


def _by_hand(source: int, target: int, size: int, source_offset: int, target_offset: int) -> int:
    data = os.pread(source, min(size, _READ_BYTES), source_offset)
    write_at(target, data, target_offset)
    return len(data)
