"""Reads format version 1, in which every piece of every file has a row. Nothing writes it any more.

Entries in order:
    format, format_version, step, run: the program's name for the format, 1, the step, a random name of the save.
    record: the caller's JSON object.
    chunk_bytes: files are hashed in chunks of this many bytes, the last one shorter.
    files: rows of name, size in bytes, SHA-256, list of the chunks' SHA-256.
    tensors: rows of global name, global shape. kinds, types: the words that pieces refer to by number.
    pieces: rows of tensor, kind and element type (numbers in these tables), box start, box stop, flat range in the box
        (first, last), file (number in files), first byte in that file. Values are little-endian and row-major.
    digest: SHA-256 of everything before this entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from megatron.checkpoint.catalogue import ITEM_BYTES, Catalogue, StoredRun
from megatron.checkpoint.manifests.checked_rows import LEAST_HEADER_BYTES, CheckedRows, Tensors
from megatron.checkpoint.manifests.contents import Manifest, StoredFile


def read_version_1(path: Path, values: dict[str, Any], digest: str) -> Manifest:
    """The manifest in a parsed text.

    Raises:
        DamagedError: something in it cannot be.
    """
    return _Version1(path, values).manifest(digest)


@final
class _Version1(CheckedRows):
    def manifest(self, digest: str) -> Manifest:
        step, run, record, chunk_bytes = self.head()
        files, tensors = self.files(chunk_bytes), self.tensors()
        runs, begins = self._pieces(files, tensors)
        runs = self._in_files_order(files, runs, begins)
        self.check_tensors(tensors, runs)
        sizes = [file.size_bytes for file in files]
        return Manifest(step, run, record, chunk_bytes, files, Catalogue(runs, sizes.__getitem__), digest)

    def _pieces(self, files: Sequence[StoredFile], tensors: Tensors) -> tuple[list[StoredRun], list[int]]:
        """Reads the pieces; each row is given up as soon as it is read, so that not all are in memory twice."""
        runs: list[StoredRun] = []
        begins: list[int] = []
        rows: list[Any] = self.rows("pieces", (9,))
        for at, row in enumerate(rows):
            rows[at] = None
            file = self.entry(files, self.number(row[7], "an index"))
            begin_bytes = self.number(row[8], "a piece")
            key, dtype = self.described(row, tensors)
            end_bytes = begin_bytes + key.numel * ITEM_BYTES[dtype]
            if end_bytes > file.size_bytes:
                self.refuse(f"a piece of tensor {key.name} ends at byte {end_bytes} of {file.name}, beyond its end")
            runs.append(StoredRun(key, dtype, row[7], 1, key.numel))
            begins.append(begin_bytes)
        return runs, begins

    def _in_files_order(self, files: Sequence[StoredFile], runs: list[StoredRun], begins: list[int]) -> list[StoredRun]:
        """The pieces in the order of the files; in each they must be contiguous, from the end of its header to its
        end.
        """
        file = np.array([run.file for run in runs], dtype=np.int64)
        begin = np.array(begins, dtype=np.int64)
        order = np.lexsort((begin, file))
        runs = [runs[at] for at in order.tolist()]
        file, begin = file[order], begin[order]
        end = begin + np.array([run.key.numel * ITEM_BYTES[run.dtype] for run in runs], dtype=np.int64)
        firsts = np.flatnonzero(np.diff(file, prepend=-1))
        held = set(file[firsts].tolist())
        for number, stored in enumerate(files):
            if number not in held:
                self.refuse(f"no piece lies in {stored.name}")
        expected = np.concatenate([[0], end[:-1]])
        expected[firsts] = begin[firsts]
        for at in np.flatnonzero(begin != expected).tolist()[:1]:
            what = "overlaps the one before it" if begin[at] < expected[at] else "leaves a hole before it"
            name = files[runs[at].file].name
            self.refuse(f"the piece of tensor {runs[at].key.name} at byte {int(begin[at])} of {name} {what}")
        for at in firsts[begin[firsts] < LEAST_HEADER_BYTES].tolist():
            what, name = f"byte {int(begin[at])} lies in the header of", files[runs[at].file].name
            self.refuse(f"the piece of tensor {runs[at].key.name} at {what} {name}")
        for at in [*(firsts[1:] - 1).tolist(), *([len(end) - 1] if len(end) else [])]:
            stored = files[int(file[at])]
            if end[at] != stored.size_bytes:
                self.refuse(f"{stored.name} has {stored.size_bytes} bytes, but its pieces end at byte {int(end[at])}")
        return runs
