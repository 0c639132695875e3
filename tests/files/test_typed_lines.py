"""Lines of standard input: each is UTF-8, or refused by its number."""

from __future__ import annotations

import io
import os
import pty

import pytest

from megatron.errors import DataError
from megatron.files.typed_lines import read_line


def test_a_line_that_is_not_utf8_is_refused_and_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = "zwölf\r\n\n".encode() + b"\xff\xfe hi\nlast"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
    assert [read_line("> ", 1), read_line("> ", 2)] == ["zwölf", ""]
    with pytest.raises(DataError, match="line 3 of standard input is not UTF-8"):
        read_line("> ", 3)
    assert [read_line("> ", 4), read_line("> ", 5)] == ["last", None]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_terminal_may_send_another_encoding(monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, encoding="utf-8", errors=errors) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        os.write(ours, b"\xff hi\n")
        with pytest.raises(DataError, match="line 7 of standard input"):
            read_line("> ", 7)
    os.close(ours)


def test_a_closed_input_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert read_line("> ", 1) is None
