"""The known keys of a DeepSpeed settings file and their status, read from `deepspeed_keys.txt`."""

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
        description: for messages, such as "an integer from 1 to 10".
    """

    least: float
    most: float
    is_whole: bool
    is_list: bool
    description: str


Values = type | tuple[str, ...] | Range
_TYPES: Mapping[str, type] = types.MappingProxyType({"bool": bool, "section": dict, "texts": list})
# Kind of range -> (numbers are whole, values are lists, name in messages).
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
    """One key: its dotted name, its status, the values it accepts, and the reason.

    Attributes:
        reason: why a key is ignored or refused; the flag of a governed key.
        values: of a supported or governed key: `bool`, `dict` (a section), `list` (of strings), a tuple of choices, or
            a range of numbers.
        off: a value, in JSON notation, with which an ignored or refused key has no effect, in addition to the usual
            ones; may be empty.
    """

    name: str
    status: str
    reason: str
    values: Values | None
    off: str


@functools.cache
def deepspeed_keys() -> Mapping[str, DeepSpeedKey]:
    """Reads the table of keys, by name."""
    return types.MappingProxyType(
        {name: _key(name, row) for row in read_status_table(TABLE) for name in _spellings(row.name)}
    )


@functools.cache
def governing_flags() -> Mapping[tuple[str, ...], str]:
    """The flag that governs each setting, by the path of the setting in the file."""
    keys = (key for key in deepspeed_keys().values() if key.status == GOVERNED and key.reason.startswith("--"))
    return types.MappingProxyType({tuple(key.name.split(".")): key.reason for key in keys})


def _spellings(name: str) -> list[str]:
    """The spellings of a name: without and with the part in brackets."""
    before, bracket, rest = name.partition("[")
    inside, _, after = rest.partition("]")
    return [before + after, before + inside + after] if bracket else [name]


def _key(name: str, row: StatusRow) -> DeepSpeedKey:
    if row.arguments[:1] == ["off"]:
        return DeepSpeedKey(name, row.status, row.reason, None, row.arguments[1])
    return DeepSpeedKey(name, row.status, row.reason, _values(row.arguments), "")


def _values(arguments: Sequence[str]) -> Values | None:
    if not arguments:
        return None
    if arguments[0] in _TYPES:
        return _TYPES[arguments[0]]
    if arguments[0] not in _RANGES:
        return tuple(arguments[0].split("|"))
    is_whole, is_list, kind = _RANGES[arguments[0]]
    number = int if is_whole else float
    least, most = arguments[1].replace("_", "").split("..")
    return Range(number(least), number(most), is_whole, is_list, f"{kind} from {least} to {most}")
