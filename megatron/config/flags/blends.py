"""Parsing of data flags: splits, weighted blends of sources, and named groups of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from megatron.errors import ConfigError
from megatron.secret_text import SecretText, guarded, reveal

MOCK_DATA = "mock:"  # a source of random ids instead of a prefix
_SHARD_NAME = re.compile(r"-\d{5,}-of-\d{5,}$")


@dataclass(frozen=True)
class WeightedPath:
    """One entry of a weighted group: `weight start:stop prefix`."""

    weight: float
    start: float
    stop: float
    prefix: str


@dataclass(frozen=True)
class WeightedGroup:
    """A named blend of dataset ranges, read from `NAME: W S:E PREFIX, W S:E PREFIX`."""

    name: str
    entries: tuple[WeightedPath, ...]


def read_split(text: str) -> tuple[float, float, float]:
    """Reads `969,30,1`: the train, validation and test split, normalized; missing shares are 0.

    Raises:
        ConfigError: a share is not a number or is negative, or there are more than three, or all are 0.
    """
    parts = [part.strip() for part in text.replace("/", ",").split(",")]
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        raise ConfigError(f"--split {text} is invalid. Expected a list of numbers such as 969,30,1.") from None
    if len(shares) > 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ConfigError(
            f"--split {shown_split(text)} must have up to three shares, none negative, not all 0, such as 969,30,1."
        )
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    return shares[0] / total, shares[1] / total, shares[2] / total


def shown_split(text: str) -> str:
    """A split without blanks, as an argument of `--split`."""
    return "".join(text.split())


def read_blend(arguments: tuple[str, ...], name: str) -> tuple[tuple[float, str], ...]:
    """Reads `PREFIX ...` or `WEIGHT PREFIX WEIGHT PREFIX ...` into (weight, prefix) pairs.

    Prefixes without weights get the weight 0, which stands for their number of tokens.

    Raises:
        ConfigError: an odd number of arguments, a weight that is not a positive number, or a NUL character.
    """
    shown = " ".join(arguments)
    _check_no_nul(shown, name)
    if len(arguments) <= 1:
        return tuple((1.0, prefix) for prefix in arguments)
    if not any(_number(argument) is not None for argument in arguments) and not _quote_hint(arguments):
        return tuple((0.0, prefix) for prefix in arguments)
    if len(arguments) % 2:
        raise ConfigError(
            f"{name} {shown} has {len(arguments)} arguments. Expected prefixes, or weight-prefix "
            f"pairs{_quote_hint(arguments)}."
        )
    pairs = []
    for weight, prefix in zip(arguments[::2], arguments[1::2], strict=True):
        value = _number(weight)
        if value is None or not 0 < value < float("inf"):
            raise ConfigError(
                f'{name} {shown}: "{weight}" must be a positive weight, followed by its prefix{_quote_hint(arguments)}.'
            )
        pairs.append((value, prefix))
    return tuple(pairs)


def read_weighted_group(text: str, name: str) -> WeightedGroup:
    """Reads one group `NAME: W S:E PREFIX, W S:E PREFIX`; a prefix with a secret is guarded.

    Raises:
        ConfigError: the text does not have this form or holds a NUL, or a range is not within 0 <= S < E <= 1.
    """
    group = _read_group(str(text), name)  # masked, as messages show parts of it
    if not isinstance(text, SecretText):
        return group
    try:
        prefixes = [guarded(entry.prefix) for entry in _read_group(reveal(text), name).entries]
    except ConfigError:
        prefixes = []
    if [str(prefix) for prefix in prefixes] != [entry.prefix for entry in group.entries]:
        raise ConfigError(
            f'{name} "{text}": a password or option contains a comma or a blank, which separate entries of a group. '
            "Write %2C for a comma and %20 for a blank."
        )
    entries = zip(group.entries, prefixes, strict=True)
    return WeightedGroup(group.name, tuple(replace(entry, prefix=prefix) for entry, prefix in entries))


def _read_group(text: str, name: str) -> WeightedGroup:
    _check_no_nul(text, name)
    label, colon, rest = text.partition(":")
    form = f'{name} "{text}": expected "NAME: WEIGHT START:STOP PREFIX, WEIGHT START:STOP PREFIX"'
    if not colon or not label.strip() or not rest.strip():
        raise ConfigError(f"{form}; the name and its colon, or the entries, are missing.")
    entries = []
    for entry in rest.split(","):
        arguments = entry.split()
        if len(arguments) != 3:
            raise ConfigError(f'{form}; the entry "{entry.strip()}" has {len(arguments)} parts, not 3.')
        weight, (start, stop) = _number(arguments[0]), _range(arguments[1])
        if weight is None or not 0 < weight < float("inf"):
            raise ConfigError(f'{form}; the weight "{arguments[0]}" is not a positive number.')
        if start is None or stop is None or not 0 <= start < stop <= 1:
            raise ConfigError(f'{form}; the range "{arguments[1]}" must be START:STOP with 0 <= START < STOP <= 1.')
        entries.append(WeightedPath(weight, start, stop, arguments[2]))
    return WeightedGroup(label.strip(), tuple(entries))


def _quote_hint(arguments: tuple[str, ...]) -> str:
    """A hint if the shell has expanded a pattern."""
    is_expanded = arguments[0].endswith(".parquet") or _SHARD_NAME.search(arguments[0])
    return "; a pattern of Parquet files must be quoted, so that the shell does not expand it" if is_expanded else ""


def _check_no_nul(text: str, name: str) -> None:
    if "\0" in text:
        raise ConfigError(
            f"{name} {text!r} contains a NUL character at position {text.index(chr(0))}, which is invalid in a path. "
            "The file it was read from is damaged: write it again."
        )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _range(text: str) -> tuple[float | None, float | None]:
    start, _, stop = text.partition(":")
    return _number(start), _number(stop)
