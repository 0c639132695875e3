"""What Linux says of this machine's CPU."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


def cpu_features() -> frozenset[str]:
    """The instruction sets, as Linux names them; empty where it does not say."""
    return frozenset(_line("flags|Features").split())


@cache
def cpu_vendor() -> str:
    """Who made it, such as `GenuineIntel` or `AuthenticAMD`; empty where Linux does not say."""
    return _line("vendor_id")


def _line(names: str) -> str:
    try:
        text = _CPU_INFO.read_text("utf-8", errors="replace")
    except OSError:
        return ""
    line = re.search(rf"^(?:{names})\s*:(.*)$", text, re.MULTILINE)
    return "" if line is None else line.group(1).strip()
