"""Launchers of a `.cu` file and their parameters, read from its text, so that tests need not repeat them."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DEFINITION = re.compile(r'(?:extern\s+"C"\s+)?\bint\s+(megatron_\w+)\s*\(([^)]*)\)\s*\{')
TYPES = {
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "unsigned int": ctypes.c_uint,
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "long long": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "cudaStream_t": ctypes.c_void_p,
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a launcher."""

    name: str
    type: type

    @property
    def is_pointer(self) -> bool:
        return self.type is ctypes.c_void_p


@cache
def read_signatures(source: Path) -> dict[str, tuple[Parameter, ...]]:
    """The parameters of every `int megatron_…(…)` that the file defines.

    Raises:
        ValueError: a parameter has a type that a launcher does not take.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source.read_text(), flags=re.DOTALL)
    return {
        name: tuple(_parameter(part) for part in parameters.split(",") if part.strip())
        for name, parameters in DEFINITION.findall(text)
    }


def _parameter(text: str) -> Parameter:
    words = re.sub(r"\b(const|__restrict__|std::)\s*", "", " ".join(text.split())).strip()
    kind, name = re.fullmatch(r"(.*?[\s*&])\s*(\w+)", words).groups()  # type: ignore[union-attr]
    if "*" in kind:
        return Parameter(name, ctypes.c_void_p)
    if kind.strip() not in TYPES:
        raise ValueError(f"the type of parameter {name!r} is {kind.strip()!r}; launchers take {', '.join(TYPES)}")
    return Parameter(name, TYPES[kind.strip()])
