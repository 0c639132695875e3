"""What a corpus is made from: sizes and fast hashes of its sources, and the versions of the programs that made it."""

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
    """Records blocks as they pass: how many bytes of text each source gave, and their XXH3 hash.

    The text is hashed as it is encoded, uncompressed, so that the same lines have the same hash however they were
    packed. It costs less than a hundredth of encoding; without the xxhash package it is left out.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._hashes: dict[str, Any] = {}
        self._new_hash = _hash_maker()

    def watch(self, blocks: Iterable[InputBlock]) -> Iterator[InputBlock]:
        """Passes the blocks on unchanged."""
        for block in blocks:
            self._note(block)
            yield block

    def records(self) -> tuple[SourceRecord, ...]:
        """One record per source, in the order in which they came."""
        return tuple(
            SourceRecord(path, size, self._hashes[path].hexdigest() if self._hashes.get(path) is not None else None)
            for path, size in self._sizes.items()
        )

    def _note(self, block: InputBlock) -> None:
        is_new = block.source not in self._sizes
        if block.layout == "parquet":  # has no lines: its own bytes count, once
            if not os.path.exists(block.source):  # rows of a dataset, which are cut into blocks in many ways
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
            for piece in _pieces(block):
                running.update(piece)
        except OSError:  # encoding the block meets the same error and reports it
            self._hashes[block.source] = None


def versions() -> dict[str, str]:
    """Versions of this package and of what decides the ids."""
    installed = {"trident-megatron": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def _pieces(block: InputBlock) -> Iterator[bytes | memoryview]:
    """The bytes of a block, through one small buffer when they are in a file: each is looked at before the next."""
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
