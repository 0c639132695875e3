"""Parsing lines of JSON into texts, with the exact place of a bad line.

`orjson` parses where it is installed. A line that it refuses is tried again by the standard library, which upstream
uses and which accepts more (NaN, for one); a line is bad when both refuse it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron import log
from megatron.errors import DataError
from megatron.files.formats import LOOKS_LIKE
from megatron.tokenizers.encoders.long_text import LongText

LONG_LINE_BYTES = 8 << 20  # a text of this length is encoded in pieces
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NOT_JSON = "not JSON"
_SHOWN_BAD_LINES = 5
_REFUSALS = (ValueError, KeyError, TypeError, RecursionError)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class BadLine:
    """A line that gives no document.

    Args:
        line: its number inside the block, from 0.
        offset: byte offset of the fault inside the block.
        reason: what is wrong, in words.
    """

    line: int
    offset: int
    reason: str


@dataclass
class BadLines:
    """What becomes of bad lines: the first one stops the job, or the first few are shown and all are left out.

    Args:
        are_skipped: whether they are left out.
        consequence: follows the reason in the error.
        count: of those left out.
    """

    are_skipped: bool
    consequence: str = ""
    count: int = 0

    def take(self, bad: Sequence[BadLine], count: int, source: str, start: int, line: int) -> None:
        """Takes the bad lines of a block, of which the first few are given.

        Args:
            source, start: of the block.
            line: lines of the source before the block.

        Raises:
            DataError: there is one, and they are not left out.
        """
        for entry in bad:
            where = f"{source}:{line + entry.line + 1}: byte offset {start + entry.offset}: {entry.reason}"
            if not self.are_skipped:
                raise DataError(f"{where}. {self.consequence}{_advice(source, entry.reason)}".rstrip())
            if self.count < _SHOWN_BAD_LINES:
                log.warning(f"{where}; skipped")
            self.count += 1
        self.count += count - len(bad)


def _advice(source: str, reason: str) -> str:
    """What to do about a line that gives no document."""
    advice = "Fix the line, or leave such lines out with --on-bad-line skip."
    if LOOKS_LIKE in reason:
        return ""
    if not reason.startswith(_NOT_JSON):
        return advice
    if source == "<stdin>":
        return rf"{advice} If this is plain text, say what ends a document, such as --document-separator '\n'."
    return rf"{advice} If this is plain text, call the file *.txt: then each line is a document."


@dataclass
class ParsedLines:
    """What a block of lines holds.

    Args:
        texts: for each key, the texts of the good lines in order: `str`, or `LongText` where that was asked for.
        lines: number of lines, bad and blank ones included.
        bad: the first few bad lines, or all that were wanted; every one counts in `bad_count`.
    """

    texts: list[list[Any]]
    lines: int = 0
    bad: list[BadLine] = field(default_factory=list)
    bad_count: int = 0
    shows_all: bool = False

    def add_bad(self, bad: BadLine) -> None:
        """Counts a bad line, and keeps it if it is wanted."""
        self.bad_count += 1
        if self.shows_all or len(self.bad) < _SHOWN_BAD_LINES:
            self.bad.append(bad)


def parse_lines(
    data: bytes,
    keys: Sequence[str],
    is_first: bool,
    skip_bad: bool,
    hold_long: bool = False,
    shows_all: bool = False,
) -> ParsedLines:
    """Takes the texts under `keys` out of every line of a block; blank lines, also inside, are passed over.

    Args:
        keys: `a.b` is the key of that name or, where there is none, key b of the object under a.
        is_first: the block starts its file, so a byte order mark may come first.
        skip_bad: continue after a bad line; otherwise stop at it.
        hold_long: a very long text is given as a `LongText`.
    """
    lines, skipped_bytes = split_lines(data, is_first)
    parsed = ParsedLines([[] for _ in keys], len(lines), shows_all=shows_all)
    hold_long = hold_long and max(map(len, lines), default=0) >= LONG_LINE_BYTES
    if hold_long or len(keys) > 1 or "." in keys[0]:
        _parse_keys(parsed, lines, keys, skip_bad, hold_long)
    else:
        _parse_one_key(parsed, lines, keys[0], skip_bad)
    if parsed.bad:
        parsed.bad = _with_offsets(parsed.bad, lines, skipped_bytes)
    return parsed


def split_lines(data: bytes, is_first: bool) -> tuple[list[bytes], int]:
    """The lines of a block, and how many bytes before them were left out; a single line keeps its newline.

    Args:
        is_first: the block starts its file, so a byte order mark may come first.
    """
    skipped_bytes = len(BYTE_ORDER_MARK) if is_first and data.startswith(BYTE_ORDER_MARK) else 0
    if skipped_bytes:
        data = data[skipped_bytes:]
    if not 0 <= data.find(b"\n") < len(data) - 1:  # a single line, which may be too long to copy
        return ([data] if data else []), skipped_bytes
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines, skipped_bytes


def is_blank(line: bytes) -> bool:
    """Whether nothing but white space is in a line: readers of JSON Lines pass over it."""
    return not line or line.isspace()


def _parse_one_key(parsed: ParsedLines, lines: list[bytes], key: str, skip_bad: bool) -> None:
    append, loads = parsed.texts[0].append, _LOADS
    for number, line in enumerate(lines):
        try:
            text = loads(line)[key]
        except _REFUSALS:
            text = None
        if type(text) is str:
            append(text)
            continue
        if is_blank(line):
            continue
        texts_or_bad = _second_look(line, [key], number)
        if isinstance(texts_or_bad, BadLine):
            parsed.add_bad(texts_or_bad)
            if not skip_bad:
                break
        else:
            append(texts_or_bad[0])


def _parse_keys(parsed: ParsedLines, lines: list[bytes], keys: Sequence[str], skip_bad: bool, hold_long: bool) -> None:
    for number, line in enumerate(lines):
        if is_blank(line):
            continue
        texts_or_bad = _second_look(line, keys, number)
        if isinstance(texts_or_bad, BadLine):
            parsed.add_bad(texts_or_bad)
            if not skip_bad:
                break
            continue
        for texts, text in zip(parsed.texts, texts_or_bad, strict=True):
            texts.append(held_text(text) if hold_long else text)


def held_text(text: str) -> str | LongText:
    """The text, as a `LongText` if it is very long."""
    if len(text) < LONG_LINE_BYTES:
        return text
    utf8 = bytearray()
    for start in range(0, len(text), LONG_LINE_BYTES):  # not at once, which would hold it twice
        utf8 += text[start : start + LONG_LINE_BYTES].encode()
    return LongText(utf8)


def _second_look(line: bytes, keys: Sequence[str], number: int) -> list[str] | BadLine:
    """The texts of one line, or what is wrong with it; `offset` is inside the line."""
    may_hold_surrogates = False
    try:
        entry = _LOADS(line)
    except _REFUSALS:
        entry = _parse_slowly(line, number)
        may_hold_surrogates = True
    return entry if isinstance(entry, BadLine) else _texts(entry, keys, number, may_hold_surrogates)


def _texts(entry: Any, keys: Sequence[str], number: int, may_hold_surrogates: bool) -> list[str] | BadLine:
    """The texts under the keys of a parsed line."""
    if not isinstance(entry, dict):
        return BadLine(number, 0, f"the line holds a JSON {_kind(entry)}, not an object")
    texts: list[str] = []
    for key in keys:
        try:
            text = entry[key] if key in entry else _nested(entry, key)
        except KeyError:
            return BadLine(
                number,
                0,
                f"key {key!r} (--json-keys) is missing; the line has "
                f"{', '.join(map(repr, list(entry)[:8])) or 'no keys'}",
            )
        if not isinstance(text, str):
            return BadLine(number, 0, f"key {key!r} holds a JSON {_kind(text)}, not a string")
        surrogate = _LONE_SURROGATE.search(text) if may_hold_surrogates else None
        if surrogate:
            reason = f"holds the lone surrogate U+{ord(surrogate.group()):04X}, which is not a character"
            return BadLine(number, 0, f"key {key!r} {reason}")
        texts.append(text)
    return texts


def _nested(entry: dict[str, Any], key: str) -> Any:
    """Value under a path of keys.

    Raises:
        KeyError: there is none.
    """
    value: Any = entry
    for name in key.split("."):
        if not isinstance(value, dict):
            raise KeyError(key)
        value = value[name]
    return value


def _parse_slowly(line: bytes, number: int) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as failure:
        return BadLine(number, failure.start, f"not UTF-8: byte 0x{line[failure.start]:02x} ({failure.reason})")
    try:
        return json.loads(text)
    except json.JSONDecodeError as failure:
        return BadLine(number, len(text[: failure.pos].encode("utf-8")), f"{_NOT_JSON}: {failure.msg}")
    except RecursionError:
        return BadLine(number, 0, "nested too deeply for JSON")
    except ValueError as failure:
        return BadLine(number, 0, f"{_NOT_JSON}: {failure}")


def _with_offsets(bad: list[BadLine], lines: list[bytes], skipped_bytes: int) -> list[BadLine]:
    """Turns offsets inside a line into offsets inside the block."""
    placed = []
    start, reached = skipped_bytes, 0
    for entry in bad:
        start += sum(len(line) + 1 for line in lines[reached : entry.line])
        reached = entry.line
        placed.append(BadLine(entry.line, start + entry.offset, entry.reason))
    return placed


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "value")


def _fastest_loads() -> Callable[[bytes], Any]:
    try:
        import orjson
    except ImportError:
        return _standard_loads
    return orjson.loads


def _standard_loads(line: bytes) -> Any:
    """The standard library's parser, refusing like `orjson` what may hold a lone surrogate: the second look decides."""
    if b"\\ud" in line.lower():
        raise ValueError("an escaped surrogate, which may be a lone one")
    return json.loads(line.decode("utf-8"))


_LOADS = _fastest_loads()
