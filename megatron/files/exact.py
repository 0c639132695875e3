"""Reading and writing an exact number of bytes, since a system call may transfer fewer than requested.

Each function takes the call as an argument, so that files at an offset, pipes and storage with injected faults share
one loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any


def read_exactly(read: Callable[[int, int], bytes], size_bytes: int) -> bytes:
    """Reads `size_bytes` bytes, or as many as there are.

    Args:
        read: takes the number of bytes to read at most and the number already read; returns b"" at the end.
    """
    data = read(size_bytes, 0)
    if len(data) == size_bytes or not data:
        return data
    parts = [data]
    done = len(data)
    while done < size_bytes and (part := read(size_bytes - done, done)):
        parts.append(part)
        done += len(part)
    return b"".join(parts)


def read_into(read: Callable[[memoryview, int], int], target: memoryview) -> int:
    """Fills `target`; returns the number of bytes read, which is less than its length only at the end of the data.

    Args:
        read: takes the rest of the target and the number of bytes already read; returns how many it read, 0 at the end.
    """
    done = 0
    while done < len(target):
        count = read(target[done:], done)
        if count <= 0:
            break
        done += count
    return done


def write_all(write: Callable[[memoryview, int], int], data: Any) -> None:
    """Writes all bytes.

    Args:
        write: takes the remaining bytes and the number already written; returns how many it wrote.
        data: bytes, or any contiguous buffer.

    Raises:
        OSError: `write` failed, or accepted no byte.
    """
    content = memoryview(data).cast("B")
    done = 0
    while done < len(content):
        count = write(content[done:], done)
        if count <= 0:
            raise OSError(errno.EIO, "the file system accepts no more bytes")
        done += count


def write_at(descriptor: int, data: Any, offset: int) -> None:
    """Writes bytes at an offset of an open file.

    Raises:
        OSError: see `write_all`.
    """
    write_all(lambda rest, done: os.pwrite(descriptor, rest, offset + done), data)
