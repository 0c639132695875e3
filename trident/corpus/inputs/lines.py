"""Parses JSON lines into texts, with the exact location of a bad line.

`orjson` parses if installed. The standard library, which upstream uses, retries lines that it rejects and accepts more
(such as NaN); a line is bad if both reject it.
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

LONG_LINE_BYTES = 8 << 20  # a text of this length is encoded in chunks
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NOT_JSON = "not JSON"
_SHOWN_BAD_LINES = 5
_REFUSALS = (ValueError, KeyError, TypeError, RecursionError)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class BadLine:
    """A line that gives no document.

    Args:
        line: its index in the block.
        offset: byte offset of the fault in the block.
        reason: description of the fault.
    """

    line: int
    offset: int
    reason: str


@dataclass
class BadLines:
    """Handles bad lines: the first one stops the job, or the first few are logged and all are skipped.

    Args:
        are_skipped: skip bad lines.
        consequence: follows the reason in the error.
        count: number of skipped lines.
    """

    are_skipped: bool
    consequence: str = ""
    count: int = 0

    def take(self, bad: Sequence[BadLine], count: int, source: str, start: int, line: int) -> None:
        """Handles the bad lines of a block, given the first few and their total number.

        Args:
            source, start: of the block.
            line: number of lines of the source before the block.

        Raises:
            DataError: a line is bad, and bad lines are not skipped.
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
    advice = "Fix the line, or skip such lines with --on-bad-line skip."
    if LOOKS_LIKE in reason:
        return ""
    if not reason.startswith(_NOT_JSON):
        return advice
    if source == "<stdin>":
        return rf"{advice} If this is plain text, set the document separator, such as --document-separator '\n'."
    return rf"{advice} If this is plain text, rename the file to *.txt: then each line is a document."


@dataclass
class ParsedLines:
    """The contents of a block of lines.

    Args:
        texts: for each key, the texts of the good lines in order: `str`, or `LongText` if requested.
        lines: number of lines, bad and blank ones included.
        bad: the first few bad lines, or all with `shows_all`; `bad_count` is their total number.
    """

    texts: list[list[Any]]
    lines: int = 0
    bad: list[BadLine] = field(default_factory=list)
    bad_count: int = 0
    shows_all: bool = False

    def add_bad(self, bad: BadLine) -> None:
        """Counts a bad line, and keeps it within the limit."""
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
    """Extracts the texts under `keys` from every line of a block; blank lines are skipped.

    Args:
        keys: `a.b` is the key of that name or, if missing, key b of the object under a.
        is_first: the block starts its file, so a byte order mark may come first.
        skip_bad: continue after a bad line; otherwise stop at it.
        hold_long: return very long texts as `LongText`.
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
    """Returns the lines of a block, and the number of skipped bytes before them; a single line keeps its newline.

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
    """Returns True for a line of white space, which JSON Lines readers skip."""
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
    """Returns the text, as a `LongText` if it is very long."""
    if len(text) < LONG_LINE_BYTES:
        return text
    utf8 = bytearray()
    for start in range(0, len(text), LONG_LINE_BYTES):  # encoding it at once would hold it twice
        utf8 += text[start : start + LONG_LINE_BYTES].encode()
    return LongText(utf8)


def _second_look(line: bytes, keys: Sequence[str], number: int) -> list[str] | BadLine:
    """Returns the texts of one line, or its fault with an offset inside the line."""
    may_hold_surrogates = False
    try:
        entry = _LOADS(line)
    except _REFUSALS:
        entry = _parse_slowly(line, number)
        may_hold_surrogates = True
    return entry if isinstance(entry, BadLine) else _texts(entry, keys, number, may_hold_surrogates)


def _texts(entry: Any, keys: Sequence[str], number: int, may_hold_surrogates: bool) -> list[str] | BadLine:
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
    """Returns the value under a path of keys.

    Raises:
        KeyError: a key is missing.
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
    """Converts offsets inside a line to offsets inside the block."""
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
    """Parses with the standard library, but rejects possible lone surrogates like `orjson`: `_second_look` decides."""
    if b"\\ud" in line.lower():
        raise ValueError("an escaped surrogate, which may be a lone one")
    return json.loads(line.decode("utf-8"))


_LOADS = _fastest_loads()
