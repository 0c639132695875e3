"""Human-readable numbers."""

from __future__ import annotations

import datetime

_LONGEST_SECONDS = 10_000 * 365.25 * 86_400
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


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, with days if needed: 0:12:34, 3 days, 4:05:06."""
    if not seconds < _LONGEST_SECONDS:
        return "more than 10,000 years"
    return str(datetime.timedelta(seconds=round(seconds)))


def _digits(number: float, *, whole: bool) -> str:
    return f"{number:.0f}" if whole or number >= 99.95 else f"{number:.1f}"
