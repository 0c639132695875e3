"""The beginning of the names of a tool's outputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import PurePath


def prefix_problems(flag: str, prefix: str, suffix: str, inputs: tuple[str, ...] = ()) -> Iterator[str]:
    """Refuses a prefix that ends with a slash: the names of the outputs would be nothing but their suffixes.

    Args:
        suffix: of an output, such as `_text_document.bin`.
        inputs: the tool's inputs; a name is proposed after the first.
    """
    if not prefix.endswith(("/", os.sep)):
        return
    first = next(iter(inputs), "")
    stem = "" if "://" in first else PurePath(first).name.partition(".")[0]
    name = stem if stem.isidentifier() else "corpus"
    yield (
        f"{flag} {prefix} names a folder and no files: they would be called {prefix}{suffix}. Add how their names "
        f"begin, for example {flag} {prefix}{name}."
    )
