"""The contents of a checkpoint folder, independent of the version of the format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final, overload

import numpy as np

from megatron.checkpoint.catalogue import Catalogue


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint: its size, and the SHA-256 of the whole file and of each chunk."""

    name: str
    size_bytes: int
    sha256: str
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class IndexFile:
    """A part of a manifest with the entries of `file_count` consecutive files."""

    name: str
    size_bytes: int
    sha256: str
    file_count: int


@final
class IndexedFiles(Sequence[StoredFile]):
    """The files of a checkpoint by number; index files are read lazily.

    Args:
        open_index: returns the files in an index file, given its number and the number of its first file.
    """

    def __init__(self, indexes: Sequence[IndexFile], open_index: Callable[[int, int], tuple[StoredFile, ...]]) -> None:
        self._firsts = np.cumsum([0, *(index.file_count for index in indexes)])
        self._open_index = open_index
        self._opened: dict[int, tuple[StoredFile, ...]] = {}

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @overload
    def __getitem__(self, number: int) -> StoredFile: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[StoredFile]: ...
    def __getitem__(self, number: int | slice) -> StoredFile | Sequence[StoredFile]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        index = int(np.searchsorted(self._firsts, number, side="right")) - 1
        first = int(self._firsts[index])
        if index not in self._opened:
            self._opened[index] = self._open_index(index, first)
        return self._opened[index][number - first]


@dataclass(frozen=True, eq=False)
class Manifest:
    """The contents of a checkpoint folder.

    Attributes:
        files: read lazily if there are index files.
        indexes: files with parts of the manifest; empty for most checkpoints.
    """

    step: int
    run: str
    record: dict[str, Any]
    chunk_bytes: int
    files: Sequence[StoredFile]
    catalogue: Catalogue
    digest: str
    indexes: tuple[IndexFile, ...] = ()
