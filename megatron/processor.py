"""The CPU of this machine, as reported by Linux."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


def cpu_features() -> frozenset[str]:
    """Instruction sets, as Linux names them; empty if unknown."""
    return frozenset(_line("flags|Features").split())


@cache
def cpu_vendor() -> str:
    """The vendor, such as `GenuineIntel` or `AuthenticAMD`; empty if unknown."""
    return _line("vendor_id")


def _line(names: str) -> str:
    try:
        text = _CPU_INFO.read_text("utf-8", errors="replace")
    except OSError:
        return ""
    line = re.search(rf"^(?:{names})\s*:(.*)$", text, re.MULTILINE)
    return "" if line is None else line.group(1).strip()
