"""The shared arrays of a library of kernels, from its symbols."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# A static variable of a function, as the Itanium C++ ABI writes it: the function between _ZZ and E, then the name.
LINE = re.compile(r"([0-9a-f]+) ([0-9a-f]+) [bBdD] (_ZZ\S+)")


@dataclass(frozen=True)
class SharedArray:
    """A `__shared__` array; `offset` is from where the library is loaded."""

    name: str
    offset: int
    bytes: int


def shared_arrays(symbols: Path) -> list[SharedArray]:
    """The arrays among the symbols of a library, as `nm --print-size` lists them."""
    found = LINE.findall(symbols.read_text())
    return [SharedArray(_name(mangled), int(offset, 16), int(size, 16)) for offset, size, mangled in found]


def _name(mangled: str) -> str:
    """The last identifier; its length is written before it."""
    for match in reversed(list(re.finditer(r"E(\d+)", mangled))):
        length = int(match.group(1))
        name = mangled[match.end() : match.end() + length]
        if len(name) == length and name.isidentifier():
            return name
    return mangled
