"""Numbers as a person reads them."""

from __future__ import annotations

_COUNT_UNITS = ("", "K", "M", "B", "T", "Qa", "Qi")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def short_count(number: float) -> str:
    """Two or three digits and a unit: 950, 5.3M, 10.5B, 1.2T."""
    unit = 0
    while unit + 1 < len(_COUNT_UNITS) and number >= 999.5:
        number, unit = number / 1000, unit + 1
    return _digits(number, whole=unit == 0) + _COUNT_UNITS[unit]


def short_bytes(number: float) -> str:
    """Two or three digits and a unit: 312 MiB, 1.3 GiB."""
    unit = 0
    while unit + 1 < len(_BYTE_UNITS) and number >= 999.5:
        number, unit = number / 1024, unit + 1
    return f"{_digits(number, whole=unit == 0)} {_BYTE_UNITS[unit]}"


def _digits(number: float, *, whole: bool) -> str:
    return f"{number:.0f}" if whole or number >= 99.95 else f"{number:.1f}"
