"""A corpus of real, distinct text for benchmarks, from source code and documentation on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_ROOTS = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("stdlib"),
    "/usr/share/doc",
    "/usr/include",
    "/usr/lib",
    "/usr/local",
    "/usr/share",
    sys.base_prefix,
)
_SUFFIXES = frozenset(
    (
        *(".py", ".pyi", ".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".inc", ".rs", ".java", ".js", ".ts", ".pl", ".pm"),
        *(".tcl", ".sh", ".f", ".f90", ".txt", ".md", ".rst", ".html", ".xml", ".css", ".json", ".po"),
    )
)
_LONGEST_FILE_BYTES = 2_000_000


def write_installed_text(path: Path, wanted_bytes: int) -> int:
    """Writes jsonl lines {"text", "source"} with distinct texts until there are enough bytes; returns their number."""
    size = 0
    with path.open("wb") as stream:
        for source, text in _distinct_texts():
            size += stream.write(json.dumps({"text": text, "source": source}, ensure_ascii=False).encode() + b"\n")
            if size >= wanted_bytes:
                break
    return size


def _distinct_texts() -> Iterator[tuple[str, str]]:
    seen = set()
    for root in _ROOTS:
        for folder, subfolders, names in os.walk(root):
            subfolders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                if path.suffix.lower() not in _SUFFIXES or path.is_symlink():
                    continue
                try:
                    data = path.read_bytes() if path.stat().st_size <= _LONGEST_FILE_BYTES else b""
                    text = data.decode()
                except (OSError, UnicodeDecodeError):
                    continue
                digest = hashlib.blake2b(data, digest_size=16).digest()
                if text and digest not in seen:
                    seen.add(digest)
                    yield str(path), text
