"""Diagnoses of the runtime as sentences: code offsets become lines of sources."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SITE = re.compile(r"<\+(0x[0-9a-f]+)>")


def as_sentences(raw: str, library: Path) -> list[str]:
    """The runtime's lines, with `file.cu:12` in place of every offset into `library`."""
    offsets = sorted(set(SITE.findall(raw)))
    lines = _lines_of(offsets, library) if offsets else {}
    return [SITE.sub(lambda match: lines[match.group(1)], line) for line in raw.splitlines()]


def _lines_of(offsets: list[str], library: Path) -> dict[str, str]:
    command = ["addr2line", "--exe", str(library), "--inlines", "--addresses", *offsets]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    except (OSError, subprocess.CalledProcessError):
        return {offset: f"code offset {offset}" for offset in offsets}
    chains: dict[int, list[str]] = {}
    chain: list[str] = []
    for line in output.splitlines():
        if line.startswith("0x"):
            chain = chains.setdefault(int(line, 16), [])
        else:
            chain.append(line.split(" (discriminator")[0])
    return {offset: _innermost_first(chains[int(offset, 16)]) for offset in offsets}


def _innermost_first(chain: list[str]) -> str:
    """The line itself, and where it is inlined from another file, the first line of a `.cu` file on the way."""
    names = [place.rpartition("/")[2] for place in chain]
    own = [name for name in names if not name.startswith("simt")] or names
    kernel = next((name for name in own if ".cu:" in name), own[0])
    return own[0] if kernel == own[0] else f"{own[0]}, from {kernel}"
