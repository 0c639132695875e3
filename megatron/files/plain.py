"""The one way to open a file for reading: at once, only a plain file, and no more of it than it may hold.

`open` waits at a named pipe until somebody writes into it, and `read` of a device such as /dev/zero never ends. What is
refused here is an `OSError` whose `strerror` says what the path is, so that the caller's message about a file that
cannot be read, which names the flag and the way out, is true of these as well.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from typing import Any, BinaryIO

MOST_SMALL_BYTES = 256 << 20
MOST_JSON_VALUES = 1 << 24  # a tokenizer of a million entries has a third of it
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def kind_of(mode: int) -> str | None:
    """What a file that is not plain is, in words; None for a plain file.

    Args:
        mode: `st_mode` of its status.
    """
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no plain file")


def open_plain(path: str | os.PathLike[str], buffering: int = -1, *, follows_links: bool = True) -> BinaryIO:
    """Opens a plain file for reading.

    Args:
        buffering: as of `open`.
        follows_links: whether the path may be a symbolic link.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device, a socket or a folder.
    """
    return _opened(path, buffering, with_pipes=False, follows_links=follows_links)


def open_stream(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Opens a plain file, or a pipe that the shell made for a command's output (`<(command)`), for reading in order.

    Args:
        buffering: as of `open`.

    Raises:
        OSError: it cannot be opened, or is a named pipe, a device, a socket or a folder.
    """
    return _opened(path, buffering, with_pipes=True)


def read_plain(path: str | os.PathLike[str], most_bytes: int = MOST_SMALL_BYTES, *, with_pipes: bool = False) -> bytes:
    """The content of a plain file.

    Args:
        most_bytes: a larger file is refused without reading it.
        with_pipes: the output of a command, `<(command)`, is accepted like a file.

    Raises:
        OSError: it cannot be read, is not a plain file, or is too large.
    """
    with _opened(path, -1, with_pipes=with_pipes) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= most_bytes else b""
        if len(content) > size:  # it grows, or is of a kind whose size the system does not say, as in /proc
            content += file.read(most_bytes + 1 - len(content))
    size = max(size, len(content))
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"it holds {size:,} bytes; such a file may hold {most_bytes:,}", str(path))
    return content


def read_plain_text(
    path: str | os.PathLike[str], most_bytes: int = MOST_SMALL_BYTES, *, with_pipes: bool = False
) -> str:
    """The text of a plain file in UTF-8, with `\\n` for every end of a line, as `Path.read_text` gives it.

    Raises:
        OSError: as `read_plain`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_plain(path, most_bytes, with_pipes=with_pipes).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_plain_json(
    path: str | os.PathLike[str], most_bytes: int = MOST_SMALL_BYTES, most_values: int = MOST_JSON_VALUES
) -> Any:
    """The value in a plain file of JSON.

    Raises:
        OSError: as `read_plain`.
        ValueError: as `parse_json`.
    """
    return parse_json(read_plain(path, most_bytes), most_values)


def parse_json(text: bytes | str, most_values: int = MOST_JSON_VALUES) -> Any:
    """The value of a JSON text, whose number of values is bounded before any of them is made.

    Raises:
        ValueError: it is not JSON, holds too many values, or is nested too deeply.
    """
    values = sum(text.count(mark) for mark in b"[{,") if isinstance(text, bytes) else sum(map(text.count, "[{,"))
    if values > most_values:
        raise ValueError(f"it holds about {values:,} values; such a file may hold {most_values:,}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sha256_of(stream: BinaryIO) -> str:
    """The SHA-256 of the rest of a stream, in hexadecimal digits."""
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def is_shell_pipe(path: str | os.PathLike[str], mode: int) -> bool:
    """Whether a path leads to a pipe without a name, which always has, or had, somebody who writes into it.

    Args:
        mode: `st_mode` of its status.
    """
    return stat.S_ISFIFO(mode) and not os.path.lexists(os.path.realpath(path))


def check_plain(path: str | os.PathLike[str]) -> None:
    """Checks that a plain file can be read, for libraries that open the path themselves.

    Raises:
        OSError: as `open_plain`.
    """
    open_plain(path).close()


def _opened(path: str | os.PathLike[str], buffering: int, *, with_pipes: bool, follows_links: bool = True) -> BinaryIO:
    def opener(name: str, flags: int) -> int:
        flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
        descriptor = os.open(name, flags)
        try:
            mode = os.fstat(descriptor).st_mode
            if with_pipes and is_shell_pipe(path, mode):
                os.set_blocking(descriptor, True)
            elif (kind := kind_of(mode)) is not None:
                raise OSError(errno.EINVAL, f"it is {kind}, and no plain file", str(path))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, "rb", buffering=buffering, opener=opener)  # type: ignore[return-value]
