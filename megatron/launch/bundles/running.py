"""Runs a program whose modules come out of one file: `python running.py BUNDLE PROGRAM FLAG ...`, as `--bundle` does.

Standard library only, and nothing of this package: reading it is what the bundle saves. A module that the bundle lacks
is imported from its own file, as without it. `making.py` makes the file.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import marshal
import mmap
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from types import CodeType, ModuleType

MAGIC = b"trident bundle 1"
LENGTH_BYTES = 8


class BundleLoader(importlib.machinery.SourceFileLoader):
    """Takes a module's code from the bundle; all else, such as data next to it, is where its source is."""

    def __init__(self, name: str, path: str, code: memoryview) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        """The compiled module."""
        return marshal.loads(self._code)  # type: ignore[no-any-return]


class BundleFinder:
    """Finds the modules of a bundle.

    Args:
        path: the file.

    Raises:
        ValueError: it was made for another interpreter or another environment.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self._content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        head = MAGIC + importlib.util.MAGIC_NUMBER
        length_at = len(head)
        if self._content[:length_at] != head:
            raise ValueError("made by another version of Python or of this program")
        index_at = length_at + LENGTH_BYTES
        self._code_at = index_at + int.from_bytes(self._content[length_at:index_at], "big")
        index = json.loads(bytes(self._content[index_at : self._code_at]))
        if index["prefix"] != sys.prefix:
            raise ValueError(f"made for the environment {index['prefix']}, and this is {sys.prefix}")
        self.modules: dict[str, list[object]] = index["modules"]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Where a module is; None if it is not in the bundle."""
        entry = self.modules.get(name)
        if entry is None:
            return None
        source, is_package, begin, size = str(entry[0]), bool(entry[1]), int(str(entry[2])), int(str(entry[3]))
        begin += self._code_at
        return importlib.util.spec_from_file_location(
            name,
            source,
            loader=BundleLoader(name, source, self._content[begin : begin + size]),
            submodule_search_locations=[os.path.dirname(source)] if is_package else None,
        )


def main(words: Sequence[str]) -> None:
    """Runs the program as `python PROGRAM FLAG ...` would."""
    bundle, program = words[0], words[1]
    try:
        sys.meta_path.insert(0, BundleFinder(bundle))
    except (OSError, ValueError, KeyError) as failure:
        warnings.warn(f"{bundle} is not used (--bundle): {failure}", stacklevel=2)
    sys.argv = list(words[1:])
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
