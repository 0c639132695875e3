"""Tables of known names in text files: a line with status and reason applies to the indented names below it.

ignored: the reason
  name argument ...
  another_name
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
    """A name with its status, the reason (may be empty), and the arguments after the name."""

    name: str
    status: str
    reason: str
    arguments: list[str]


def read_status_table(path: Path) -> Iterator[StatusRow]:
    """Reads the rows of a table in order; lines that begin with `#` are comments."""
    status = reason = ""
    for line in read_plain_text(path).splitlines():
        if line.startswith("  "):
            name, *arguments = line.split()
            yield StatusRow(name, status, reason, arguments)
        elif not line.startswith("#"):
            status, _, reason = line.partition(": ")
