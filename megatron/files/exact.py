"""Reading and writing an exact number of bytes, however many system calls that takes.

A system call may move fewer bytes than it was asked to. Each function takes the call itself, so that files at an
offset, pipes and storage with injected faults share one loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any


def read_exactly(read: Callable[[int, int], bytes], size_bytes: int) -> bytes:
    """Reads `size_bytes` bytes, or as many as there are.

    Args:
        read: reads at most a number of bytes (first argument) after those already read (second); b"" at the end.
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
    """Fills `target` in place and returns how many bytes were read: fewer than its length only at the end of the data.

    Args:
        read: reads into the rest of the target (first argument), after the bytes already read (second), and returns
            how many came; 0 at the end.
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
        write: writes some of the rest (first argument) after the bytes already written (second), and returns how many.
        data: bytes, or anything with a contiguous buffer.

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
    """Writes bytes to a place of an open file.

    Raises:
        OSError: as `write_all`.
    """
    write_all(lambda rest, done: os.pwrite(descriptor, rest, offset + done), data)
