"""Provenance of a corpus: sizes and fast hashes of its sources, and program versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from typing import Any, cast

from megatron import __version__
from megatron.data.formats.sidecar import SourceRecord
from megatron.files.plain import open_plain
from trident.corpus.inputs.block import InputBlock

_READ_BYTES = 1 << 17
_PACKAGES = ("numpy", "tokenizers", "gigatoken", "sentencepiece", "sentencex")


class SourceLog:
    """Records the size and XXH3 hash of each source's text while its blocks pass.

    The uncompressed text is hashed, so that the same lines have the same hash in any compression. This costs less than
    a hundredth of encoding; without the xxhash package it is skipped.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._hashes: dict[str, Any] = {}
        self._new_hash = _hash_maker()

    def watch(self, blocks: Iterable[InputBlock]) -> Iterator[InputBlock]:
        """Yields the blocks unchanged."""
        for block in blocks:
            self._note(block)
            yield block

    def records(self) -> tuple[SourceRecord, ...]:
        """Returns one record per source, in order of appearance."""
        return tuple(
            SourceRecord(path, size, self._hashes[path].hexdigest() if self._hashes.get(path) is not None else None)
            for path, size in self._sizes.items()
        )

    def _note(self, block: InputBlock) -> None:
        is_new = block.source not in self._sizes
        if block.layout == "parquet":  # without lines: the bytes of the file count, once
            if not os.path.exists(block.source):  # rows of a dataset, without a fixed division into blocks
                self._sizes[block.source] = self._sizes.get(block.source, 0) + block.size
                return
            if not is_new:
                return
            size = os.path.getsize(block.source)
            block = InputBlock(block.source, 0, size, None, size)
        if is_new:
            self._sizes[block.source] = 0
            self._hashes[block.source] = self._new_hash() if self._new_hash else None
        self._sizes[block.source] += block.size
        running = self._hashes[block.source]
        if running is None:
            return
        try:
            for chunk in _chunks(block):
                running.update(chunk)
        except OSError:  # encoding the block raises the same error
            self._hashes[block.source] = None


def versions() -> dict[str, str]:
    """Returns the versions of this package and of all packages that determine the ids."""
    installed = {"trident-megatron": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def _chunks(block: InputBlock) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a block; chunks from a file share one small buffer."""
    if block.data is not None:
        yield block.data
        return
    buffer = memoryview(bytearray(min(block.size, _READ_BYTES)))
    with cast(FileIO, open_plain(block.source, buffering=0)) as file:
        file.seek(block.start)
        missing = block.size
        while missing and (count := file.readinto(buffer[: min(missing, _READ_BYTES)])):
            yield buffer[:count]
            missing -= count


def _hash_maker() -> Any:
    try:
        import xxhash
    except ImportError:
        return None
    return xxhash.xxh3_64
