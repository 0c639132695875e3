"""Lines of JSON that are many megabytes long: their long strings never become a single `str`.

A long string is cut out of the line and decoded to UTF-8 piece by piece; what is left of the line, with a name in its
place, is parsed as usual.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.tokenizers.encoders.long_text import LongText

LONG_LINE_BYTES = 8 << 20
MOST_BYTES_BESIDE_LONG_STRINGS = 8 << 20  # a parser makes up to 20 bytes of one
_LONG_STRING_BYTES = 1 << 20
_PIECE_BYTES = 4 << 20
_RUN_BYTES = 256
_QUOTE = b'"'
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_ESCAPE_BYTES, _PLAIN_ESCAPE_BYTES = 6, 2  # \uXXXX, and \n


class BadPieceError(Exception):
    """A piece of a long string is not as JSON wants it.

    Args:
        piece: the piece in quotes, a JSON text of its own.
        offset: byte offset of its opening quote in the line, were it there.
    """

    def __init__(self, piece: bytes, offset: int) -> None:
        super().__init__(f"at byte {offset}")
        self.piece = piece
        self.offset = offset


@dataclass(frozen=True)
class _Span:
    """Where a long string is in the line, without its quotes, and the name that takes its place."""

    start: int
    stop: int
    name: str


class LongLine:
    """One long line, and what is left of it when its long strings are names.

    Args:
        line: the line; read from, never copied.
        loads: a JSON parser that refuses lone surrogates.
    """

    def __init__(self, line: bytes, loads: Callable[[bytes], Any]) -> None:
        self._line = line
        self._loads = loads
        self._spans = _long_strings(line)
        self._span_of = {span.name: span for span in self._spans}

    @property
    def short_bytes(self) -> int:
        """Bytes of the line that are not in its long strings."""
        return len(self._line) - sum(span.stop - span.start for span in self._spans)

    def shortened(self) -> bytes:
        """The line with a name in the place of each long string."""
        parts = []
        reached = 0
        for span in self._spans:
            parts += [self._line[reached : span.start], span.name.encode()]
            reached = span.stop
        return b"".join([*parts, self._line[reached:]])

    def offset_of(self, offset: int) -> int:
        """The place in the line of the byte that has this offset in `shortened()`."""
        for span in self._spans:
            if offset <= span.start:
                break
            offset += span.stop - span.start - len(span.name)
        return offset

    def text(self, value: str) -> str | LongText:
        """A string of the line: itself, or the long string whose place it takes.

        Raises:
            BadPieceError: a piece of it is no JSON string.
        """
        span = self._span_of.get(value)
        if span is None:
            return value
        utf8 = bytearray()
        start = span.start
        while start < span.stop:
            stop = _piece_end(self._line, start, min(start + _PIECE_BYTES, span.stop), span.stop)
            piece = _QUOTE + self._line[start:stop] + _QUOTE
            try:
                utf8 += self._decoded(piece)
            except ValueError as failure:
                raise BadPieceError(piece, start - 1) from failure
            start = stop
        return LongText(utf8)

    def _decoded(self, piece: bytes) -> bytes:
        """The UTF-8 of a JSON string; a ValueError if it has none."""
        try:
            return bytes(self._loads(piece).encode())
        except ValueError:  # a parser may also refuse what only looks like a lone surrogate
            return bytes(json.loads(piece.decode()).encode())


def _long_strings(line: bytes) -> list[_Span]:
    """The strings of a line that are long enough to be worth it; quotes are found, nothing else is looked at."""
    spans: list[_Span] = []
    mark = f"a long string {os.urandom(8).hex()}"
    position = 0
    while (start := line.find(_QUOTE, position) + 1) > 0:
        stop = _closing_quote(line, start)
        if stop < 0:
            break
        if stop - start >= _LONG_STRING_BYTES:
            spans.append(_Span(start, stop, f"{mark} {len(spans)}"))
        position = stop + 1
    return spans


def _closing_quote(line: bytes, start: int) -> int:
    position = start
    while (position := line.find(_QUOTE, position)) >= 0:
        if _backslashes_before(line, start, position) % 2 == 0:
            return position
        position += 1
    return -1


def _backslashes_before(line: bytes, start: int, position: int) -> int:
    first = position
    while first > start:
        piece = line[max(start, first - _RUN_BYTES) : first]
        others = len(piece.rstrip(b"\\"))
        first -= len(piece) - others
        if others:
            break
    return position - first


def _piece_end(line: bytes, start: int, stop: int, end: int) -> int:
    """The last place at or before `stop` where a string may be cut: inside no character, escape or surrogate pair."""
    if stop == end:
        return end
    while stop > start and line[stop] & 0xC0 == 0x80:
        stop -= 1
    last = line.rfind(b"\\", max(start, stop - _ESCAPE_BYTES + 1), stop)
    if last >= 0 and _begins_escape(line, start, last):
        size = _ESCAPE_BYTES if line[last + 1 : last + 2] == b"u" else _PLAIN_ESCAPE_BYTES
        if last + size > stop:
            stop = last
    pair = stop - _ESCAPE_BYTES
    if pair >= start and _HIGH_SURROGATE.match(line, pair) and _begins_escape(line, start, pair):
        stop = pair
    return stop if stop > start else end


def _begins_escape(line: bytes, start: int, backslash: int) -> bool:
    """Whether a backslash is not itself escaped."""
    return _backslashes_before(line, start, backslash) % 2 == 0
