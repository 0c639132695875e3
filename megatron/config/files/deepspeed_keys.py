"""Validation of a DeepSpeed settings file against the table of its keys.

DeepSpeed itself silently ignores a misspelled key, and raises a traceback for a removed key or an invalid value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.files.deepspeed_table import DeepSpeedKey, Range, deepspeed_keys
from megatron.config.flags.command_line import shown_value
from megatron.config.flags.status_table import GOVERNED, IGNORED, REFUSED

# One typo is accepted per this many letters, and always at least one.
_LETTERS_PER_ERROR = 6
_SHORTEST_PREFIX = 4
_LARGEST_EXACT_INTEGER = 2**53
_LONGEST_KEY = 80
_MAX_UNKNOWN_SHOWN = 20
_PREFIX = "stage3_"


@dataclass
class CheckedSettings:
    """The entries of a DeepSpeed file that have an effect, and messages about the others."""

    settings: dict[str, Any] = field(default_factory=dict)  # passed to DeepSpeed, or compared with flags
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    unknown: int = 0
    tree: Mapping[str, Any] = field(default_factory=dict)  # the file as written


def check_settings(tree: Mapping[str, Any], name: str) -> CheckedSettings:
    """Checks every entry of a DeepSpeed file.

    Skips keys that look like comments (`_comment`, `//`, `#`), entries that are null or "auto", and disabled sections.

    Args:
        tree: the contents of the file.
        name: the name of the file in messages.
    """
    checked = CheckedSettings(tree=tree)
    checked.settings = _check_section(tree, "", name, checked)
    if checked.unknown > _MAX_UNKNOWN_SHOWN:
        checked.problems.append(
            f"{name}: {checked.unknown - _MAX_UNKNOWN_SHOWN} more keys are unknown. Is it the right file?"
        )
    return checked


def _check_section(section: Mapping[str, Any], prefix: str, name: str, checked: CheckedSettings) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    known = deepspeed_keys()
    for key, value in section.items():
        if key.startswith(("_", "/", "#")):
            continue
        row = known.get(prefix + key)
        if row is None:
            _report_unknown(prefix + key, prefix, name, checked)
        elif value in (None, "auto"):
            continue
        elif row.status in (IGNORED, REFUSED):
            _report_without_effect(row, value, name, checked)
        elif row.values is dict:
            if not isinstance(value, Mapping):
                checked.problems.append(_wrong(name, row, "an object", value))
            elif inner := _check_inside(value, f"{prefix}{key}.", name, checked):
                kept[key] = inner
        else:
            kept[key] = _checked_value(row, value, name, checked)
    for key in [key for key in kept if key.startswith(_PREFIX) and key.removeprefix(_PREFIX) in kept]:
        checked.problems.append(
            f'{name}: "{prefix}{key}" and "{key.removeprefix(_PREFIX)}" are the same setting. Keep one of them.'
        )
    return kept


def _check_inside(section: Mapping[str, Any], prefix: str, name: str, checked: CheckedSettings) -> dict[str, Any]:
    """The settings of a section; of a disabled one, only `enabled`."""
    known = deepspeed_keys()
    is_disabled = section.get("enabled") is False and f"{prefix}enabled" in known
    if is_disabled or (section.get("device") == "none" and f"{prefix}device" in known):
        for key in section:
            if not key.startswith(("_", "/", "#")) and prefix + key not in known:
                _report_unknown(prefix + key, prefix, name, checked)
        return {"enabled": False} if is_disabled else {}
    return _check_section(section, prefix, name, checked)


def _report_unknown(key: str, prefix: str, name: str, checked: CheckedSettings) -> None:
    checked.unknown += 1
    if checked.unknown > _MAX_UNKNOWN_SHOWN:
        return
    shown = shown_value(key[:_LONGEST_KEY])[1:-1]
    known = [
        one.removeprefix(prefix) for one in deepspeed_keys() if one.startswith(prefix) and "." not in one[len(prefix) :]
    ]
    meant = closest_key(key.removeprefix(prefix), known)
    hint = f'Did you mean "{prefix}{meant}"?' if meant else "DeepSpeed 0.19 has no such key. Remove it."
    checked.problems.append(f'{name}: "{shown}" is unknown. {hint}')


def _report_without_effect(row: DeepSpeedKey, value: Any, name: str, checked: CheckedSettings) -> None:
    if not _is_active(value, row.off):
        return
    if row.status == IGNORED:
        checked.notices.append(f'{name}: "{row.name}" is ignored: {row.reason}.')
    else:
        checked.problems.append(f'{name}: "{row.name}" cannot be set here: {row.reason}. Remove it from the file.')


def _is_active(value: Any, off: str) -> bool:
    if value is None or value is False or value in ("auto", "") or (off and _as_text(value) == off):
        return False
    if isinstance(value, Mapping):
        shared = value.get("shared_parameters")  # of a method of compression
        switches = [value, shared] if isinstance(shared, Mapping) else [value]
        if any(one.get("enabled") is False for one in switches) or value.get("device") == "none":
            return False
        return any(_is_active(item, off) for key, item in value.items() if not key.startswith(("_", "/", "#")))
    return bool(value)


def _as_text(value: Any) -> str:
    """A scalar in JSON notation, the same for an int and an equal float; empty for a list or a section."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, (bool, int, str)) else ""


def _checked_value(row: DeepSpeedKey, value: Any, name: str, checked: CheckedSettings) -> Any:
    """The value in DeepSpeed's form; adds a problem if it is invalid."""
    if isinstance(row.values, Range):
        if row.values.is_list and isinstance(value, list) and all(_is_within(item, row.values) for item in value):
            return [int(item) if row.values.is_whole else item for item in value]
        if not row.values.is_list and _is_within(value, row.values):
            return int(value) if row.values.is_whole else value if abs(value) < _LARGEST_EXACT_INTEGER else float(value)
        expected = row.values.description
    elif isinstance(row.values, tuple):
        if value in row.values:
            return value
        expected = f"one of {', '.join(row.values)}"
    elif row.values is bool:
        if isinstance(value, bool):
            return value
        expected = "true or false"
    else:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        expected = "a list of strings"
    checked.problems.append(_wrong(name, row, expected, value))
    return None


def _is_within(value: Any, bounds: Range) -> bool:
    return _is_number(value, bounds.is_whole) and bounds.least <= value <= bounds.most


def _is_number(value: Any, is_whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return not is_whole or value == int(value)


def _wrong(name: str, row: DeepSpeedKey, expected: str, value: Any) -> str:
    governed = f" ({row.reason})" if row.status == GOVERNED else ""
    return f'{name}: "{row.name}"{governed} must be {expected}, or be omitted, not {shown_value(value)}.'


def closest_key(key: str, known: Iterable[str]) -> str | None:
    """The known key closest to `key`: misspelled, in another style (zeroOptimization) or truncated.

    Common words are not enough: a key of a newer DeepSpeed may share all but one of them with an old key.
    """
    if len(key) > _LONGEST_KEY:
        return None
    letters = _letters(key)
    distances = {name: _edit_distance(letters, _letters(name)) for name in sorted(known)}
    best = min(distances, key=lambda name: (distances[name], sorted(letters) != sorted(_letters(name))))
    if distances[best] <= max(1, len(letters) // _LETTERS_PER_ERROR):
        return best
    longer = [name for name in distances if _letters(name).startswith(letters)]
    return min(longer, key=lambda name: len(name)) if longer and len(letters) >= _SHORTEST_PREFIX else None


def _letters(key: str) -> str:
    return re.sub(r"[^a-z0-9]", "", key.lower())


def _edit_distance(left: str, right: str) -> int:
    """The restricted Damerau-Levenshtein distance (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, letter in enumerate(left, 1):
        following = [i]
        for j, other in enumerate(right, 1):
            cost = min(row[j] + 1, following[j - 1] + 1, row[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == right[j - 2] and left[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            following.append(cost)
        before, row = row, following
    return row[-1]
