"""The only way to open untrusted files for reading: without blocking, regular files only, of bounded size.

`open` blocks on a named pipe until a writer opens it, and `read` of a device such as /dev/zero never ends. A refusal is
an `OSError` whose `strerror` describes the path, so that the caller's usual message for an unreadable file applies.
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
    """Describes a file that is not a regular file; None for a regular file.

    Args:
        mode: `st_mode` of its status.
    """
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


def open_plain(path: str | os.PathLike[str], buffering: int = -1, *, follows_links: bool = True) -> BinaryIO:
    """Opens a regular file for reading.

    Args:
        buffering: see `open`.
        follows_links: allow a symbolic link.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device, a socket or a folder.
    """
    return _opened(path, buffering, with_pipes=False, follows_links=follows_links)


def open_stream(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Opens a regular file, or the pipe of a process substitution (`<(command)`), for sequential reading.

    Args:
        buffering: see `open`.

    Raises:
        OSError: it cannot be opened, or is a named pipe, a device, a socket or a folder.
    """
    return _opened(path, buffering, with_pipes=True)


def read_plain(path: str | os.PathLike[str], most_bytes: int = MOST_SMALL_BYTES, *, with_pipes: bool = False) -> bytes:
    """The content of a regular file.

    Args:
        most_bytes: a larger file is refused without reading it.
        with_pipes: also accept a process substitution, `<(command)`.

    Raises:
        OSError: it cannot be read, is not a regular file, or is too large.
    """
    with _opened(path, -1, with_pipes=with_pipes) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= most_bytes else b""
        if len(content) > size:  # it is growing, or its size is not reported, as in /proc
            content += file.read(most_bytes + 1 - len(content))
    size = max(size, len(content))
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes; at most {most_bytes:,} are allowed", str(path))
    return content


def read_plain_text(
    path: str | os.PathLike[str], most_bytes: int = MOST_SMALL_BYTES, *, with_pipes: bool = False
) -> str:
    """The UTF-8 text of a regular file, with universal newlines, like `Path.read_text`.

    Raises:
        OSError: see `read_plain`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_plain(path, most_bytes, with_pipes=with_pipes).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_plain_json(
    path: str | os.PathLike[str], most_bytes: int = MOST_SMALL_BYTES, most_values: int = MOST_JSON_VALUES
) -> Any:
    """The value in a regular JSON file.

    Raises:
        OSError: see `read_plain`.
        ValueError: see `parse_json`.
    """
    return parse_json(read_plain(path, most_bytes), most_values)


def parse_json(text: bytes | str, most_values: int = MOST_JSON_VALUES) -> Any:
    """Parses JSON, after bounding the number of its values.

    Raises:
        ValueError: it is not JSON, has too many values, or is nested too deeply.
    """
    values = sum(text.count(mark) for mark in b"[{,") if isinstance(text, bytes) else sum(map(text.count, "[{,"))
    if values > most_values:
        raise ValueError(f"it has about {values:,} values; at most {most_values:,} are allowed")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sha256_of(stream: BinaryIO) -> str:
    """The SHA-256 of the rest of a stream as hexadecimal digits."""
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def is_shell_pipe(path: str | os.PathLike[str], mode: int) -> bool:
    """True for an anonymous pipe, which, unlike a named one, always has or had a writer.

    Args:
        mode: `st_mode` of its status.
    """
    return stat.S_ISFIFO(mode) and not os.path.lexists(os.path.realpath(path))


def check_plain(path: str | os.PathLike[str]) -> None:
    """Checks that a regular file can be read, for libraries that open the path themselves.

    Raises:
        OSError: see `open_plain`.
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
                raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, "rb", buffering=buffering, opener=opener)  # type: ignore[return-value]
