"""Every key of a DeepSpeed settings file, with what happens to it: the rows of `deepspeed_keys.txt`."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.flags.status_table import GOVERNED, StatusRow, read_status_table

TABLE = Path(__file__).with_name("deepspeed_keys.txt")


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, or lists of such numbers.

    Attributes:
        words: for messages, such as "an integer from 1 to 10".
    """

    least: float
    most: float
    is_whole: bool
    is_list: bool
    words: str


Values = type | tuple[str, ...] | Range
_TYPES: Mapping[str, type] = types.MappingProxyType({"bool": bool, "section": dict, "texts": list})
# Kind of a range: the numbers are whole, a value is a list of them, and what messages call them.
_RANGES: Mapping[str, tuple[bool, bool, str]] = types.MappingProxyType(
    {
        "whole": (True, False, "an integer"),
        "number": (False, False, "a number"),
        "wholes": (True, True, "a list of integers"),
        "numbers": (False, True, "a list of numbers"),
    }
)


@dataclass(frozen=True)
class DeepSpeedKey:
    """One key: its dotted name, what happens to it, which values it takes, and why.

    Attributes:
        reason: of an ignored or refused key; of a governed one, the flag.
        values: of a supported or governed key: `bool`, `dict` (a section), `list` (of texts), words to choose from, or
            a range of numbers.
        off: in the notation of JSON, a value of an ignored or refused key that turns nothing on, in addition to the
            usual ones; empty if there is none.
    """

    name: str
    status: str
    reason: str
    values: Values | None
    off: str


@functools.cache
def deepspeed_keys() -> Mapping[str, DeepSpeedKey]:
    """Reads the table; the keys by name."""
    return types.MappingProxyType(
        {name: _key(name, row) for row in read_status_table(TABLE) for name in _spellings(row.name)}
    )


@functools.cache
def governing_flags() -> Mapping[tuple[str, ...], str]:
    """The flag of each setting that one flag governs, by the setting's path in the file."""
    keys = (key for key in deepspeed_keys().values() if key.status == GOVERNED and key.reason.startswith("--"))
    return types.MappingProxyType({tuple(key.name.split(".")): key.reason for key in keys})


def _spellings(name: str) -> list[str]:
    """The names that are meant: without and with the part in brackets."""
    before, bracket, rest = name.partition("[")
    inside, _, after = rest.partition("]")
    return [before + after, before + inside + after] if bracket else [name]


def _key(name: str, row: StatusRow) -> DeepSpeedKey:
    if row.words[:1] == ["off"]:
        return DeepSpeedKey(name, row.status, row.reason, None, row.words[1])
    return DeepSpeedKey(name, row.status, row.reason, _values(row.words), "")


def _values(words: Sequence[str]) -> Values | None:
    if not words:
        return None
    if words[0] in _TYPES:
        return _TYPES[words[0]]
    if words[0] not in _RANGES:
        return tuple(words[0].split("|"))
    is_whole, is_list, kind = _RANGES[words[0]]
    number = int if is_whole else float
    least, most = words[1].replace("_", "").split("..")
    return Range(number(least), number(most), is_whole, is_list, f"{kind} from {least} to {most}")
