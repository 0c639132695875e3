"""Lines of standard input, typed or piped; each is checked for UTF-8 separately."""

from __future__ import annotations

import sys

from megatron.errors import DataError


def read_line(prompt: str, number: int) -> str | None:
    """The next line of standard input without its terminator; None at the end.

    Args:
        prompt: shown on a terminal.
        number: line number, from 1.

    Raises:
        DataError: the line is not UTF-8; the next one can still be read.
    """
    if sys.stdin is None:  # closed by the parent process
        return None
    try:
        if not sys.stdin.isatty():
            data = sys.stdin.buffer.readline()
            return data.decode().rstrip("\r\n") if data else None
        line = input(prompt)
        line.encode()  # raises for surrogates, which input in another encoding becomes
    except EOFError:
        return None
    except UnicodeError as failure:
        raise DataError(f"line {number} of standard input is not UTF-8. Write it in UTF-8.") from failure
    return line
