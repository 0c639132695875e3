"""Tables of known names, kept as text: each line with a status and a reason holds for the indented names below it.

ignored: why nothing comes of them
  name and further words
  another name
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron.files.plain import read_plain_text

SUPPORTED = "supported"
GOVERNED = "governed"
IGNORED = "ignored"
REFUSED = "refused"


class StatusRow(NamedTuple):
    """One name with its status, the reason (empty where the table gives none), and the words after the name."""

    name: str
    status: str
    reason: str
    words: list[str]


def read_status_table(path: Path) -> Iterator[StatusRow]:
    """Reads the rows of a table in their order; lines that begin with `#` are comments."""
    status = reason = ""
    for line in read_plain_text(path).splitlines():
        if line.startswith("  "):
            name, *words = line.split()
            yield StatusRow(name, status, reason, words)
        elif not line.startswith("#"):
            status, _, reason = line.partition(": ")
