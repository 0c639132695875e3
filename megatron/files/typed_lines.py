"""What a person types, or a pipe holds: the lines of standard input, each of which is UTF-8 or refused by itself."""

from __future__ import annotations

import sys

from megatron.errors import DataError


def read_line(prompt: str, number: int) -> str | None:
    """The next line of standard input without its end; None after the last.

    Args:
        prompt: shown if the input is a terminal.
        number: of the line, from 1.

    Raises:
        DataError: the line is not UTF-8; the next one can be read.
    """
    if sys.stdin is None:  # closed by the parent process
        return None
    try:
        if not sys.stdin.isatty():
            data = sys.stdin.buffer.readline()
            return data.decode().rstrip("\r\n") if data else None
        line = input(prompt)
        line.encode()  # what the terminal sent in another encoding became surrogates
    except EOFError:
        return None
    except UnicodeError as failure:
        raise DataError(f"line {number} of standard input is not UTF-8. Write it in UTF-8.") from failure
    return line
