"""Writes windows of a `.bin/.idx` pair to Parquet shards: one process per shard, published together.

The rows are divided in advance, so that the shards do not depend on the number of processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron import log
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.parquet_windows import Windows
from megatron.data.formats.window_names import is_shard_of, shard_name
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.files.failures import storage_error
from megatron.files.replacing import publish_together, remove_leftovers, temporary_name, write_new
from trident.corpus.featurize.window_cutting import (
    Cutting,
    Documents,
    Numbers,
    Tally,
    cut,
    documents_of,
    regrouped,
    tally,
    window_counts,
)
from trident.corpus.featurize.window_writer import WindowWriter
from trident.corpus.workers.processes import (
    enter_worker,
    exit_error,
    failure_message,
    raise_failure,
    start_method,
    start_process,
    stop_processes,
)

_DOCUMENTS_AT_ONCE = 1 << 16


class WindowPlan:
    """All windows of a pair, counted in advance.

    Args:
        chunk_ends: from an earlier plan of the same pair; counted if None.
    """

    def __init__(self, dataset: IndexedDataset, cutting: Cutting, chunk_ends: Numbers | None = None) -> None:
        self.dataset = dataset
        self.cutting = cutting
        self.tally = Tally()
        if chunk_ends is None:
            counts = []
            for documents in self._chunks():
                self.tally += tally(cutting, documents.lengths)
                counts.append(int(window_counts(cutting, documents.lengths).sum()))
            chunk_ends = np.cumsum(np.array(counts, dtype=np.int64))
        self.chunk_ends = chunk_ends

    @property
    def rows(self) -> int:
        """Total number of windows."""
        return int(self.chunk_ends[-1]) if len(self.chunk_ends) else 0

    def windows(self, first: int, last: int) -> Iterator[tuple[Windows, Numbers]]:
        """Yields the windows [first, last) with their offsets, in groups of `rows_at_once` except for the last.

        Raises:
            DataError: the pair is damaged, or it does not hold token ids.
        """
        yield from regrouped(self._groups(first, last), self.cutting.rows_at_once)

    def _groups(self, first: int, last: int) -> Iterator[tuple[Windows, Numbers]]:
        chunk = int(np.searchsorted(self.chunk_ends, first, side="right"))
        for documents in self._chunks(chunk):
            start = int(self.chunk_ends[chunk - 1]) if chunk else 0
            if start >= last:
                return
            stop = min(last, int(self.chunk_ends[chunk])) - start
            yield from cut(self.cutting, documents, max(first - start, 0), stop)
            chunk += 1

    def _chunks(self, number: int = 0) -> Iterator[Documents]:
        """Yields a bounded number of documents at once, from a chunk on."""
        data = self.dataset
        for first in range(number * _DOCUMENTS_AT_ONCE, len(data.documents) - 1, _DOCUMENTS_AT_ONCE):
            bounds = data.documents[first : first + _DOCUMENTS_AT_ONCE + 1].astype(np.int64)
            start = int(bounds[0])
            ends = np.cumsum(np.concatenate([[0], data.lengths[start : int(bounds[-1])].astype(np.int64)]))
            lengths = np.diff(ends[bounds - start])
            read = partial(self._tokens, int(data.pointers[start]) if len(ends) > 1 else 0)
            yield documents_of(self.cutting.facts, lengths, read, data.prefix, first)

    def _tokens(self, first_byte: int, start: int, stop: int) -> np.ndarray:
        """Returns the tokens [start, stop) from a byte offset on; the sequences of a pair are contiguous."""
        return self.dataset.tokens_at(first_byte + start * self.dataset.dtype.itemsize, stop - start)


@dataclass(frozen=True)
class _Shard:
    """One shard to write: its rows, its name, and its temporary name."""

    first: int
    last: int
    path: Path
    temporary: Path


def write_shards(plan: WindowPlan, output_path: str, shards: int, workers: int) -> tuple[str, ...]:
    """Writes all windows of a plan into shards of nearly equal size, which appear together under their names.

    Shards of an earlier run of that name are replaced. An exception leaves no new files behind.

    Raises:
        DataError: the pair is damaged.
        StorageError: writing failed.
        WorkerError: a worker process exited unexpectedly.
    """
    check_integers(plan.dataset)
    prepare_folder(output_path)
    bounds = [plan.rows * number // shards for number in range(shards + 1)]
    work = []
    for number in range(shards):
        path = Path(shard_name(output_path, number, shards))
        work.append(_Shard(bounds[number], bounds[number + 1], path, temporary_name(path)))
    try:
        workers = min(workers, shards)
        if workers > 1:
            _write_in_workers(plan, work, workers)
        else:
            for shard in work:
                _write_shard(plan, shard)
        publish(output_path, [(shard.temporary, shard.path) for shard in work])
    finally:
        for shard in work:
            shard.temporary.unlink(missing_ok=True)
    return tuple(str(shard.path) for shard in work)


def check_integers(dataset: IndexedDataset) -> None:
    """Checks that a pair holds integers.

    Raises:
        DataError: it holds another type.
    """
    if dataset.dtype.kind not in "iu":
        raise DataError(f"{dataset.bin_path} holds {dataset.dtype.name}, but windows require token ids.")


def prepare_folder(output_path: str) -> None:
    """Creates the folder of an output path and removes temporary files of killed runs.

    Raises:
        ConfigError: the path ends like a folder.
        StorageError: the folder cannot be written.
    """
    path = Path(output_path)
    if output_path.endswith(os.sep) or not path.name:
        raise ConfigError(
            f"--output-path {output_path} is a folder. Use the path of the shards without their numbers: "
            f"{path / 'train'} for {shard_name(str(path / 'train'), 0, 1)}."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        names = [name[1:].split(".tmp")[0].rsplit(".", 1)[0] for name in os.listdir(path.parent) if name[0] == "."]
    except OSError as failure:
        raise storage_error(path, failure) from failure
    for name in sorted({name for name in names if is_shard_of(path.name, name) or name == path.name}):
        for leftover in remove_leftovers(path.with_name(name)):
            log.info(f"Removed {leftover}, left behind by a killed run.")


def publish(output_path: str, files: Sequence[tuple[Path, Path]]) -> None:
    """Renames complete files to the shards of an output path; older shards of that path are removed first.

    A crash in between leaves too few shards, never shards of two runs.

    Raises:
        StorageError: the file system failed; the older shards are unchanged.
    """
    folder, named = Path(output_path).parent, {path for _, path in files}
    try:
        older = [path for path in folder.iterdir() if is_shard_of(Path(output_path).name, path.name)]
    except OSError as failure:
        raise storage_error(Path(output_path), failure) from failure
    publish_together(files, [path for path in older if path not in named])


def _write_shard(plan: WindowPlan, shard: _Shard) -> None:
    def write(stream: BinaryIO) -> None:
        with WindowWriter(stream, str(shard.path), plan.cutting.facts) as writer:
            for windows, offsets in plan.windows(shard.first, shard.last):
                writer.write(windows, offsets)

    try:
        write_new(shard.temporary, write)
    except OSError as failure:
        raise storage_error(shard.path, failure) from failure


def _write_in_workers(plan: WindowPlan, shards: Sequence[_Shard], workers: int) -> None:
    """Distributes the shards over processes and waits for all; the first failure stops the others."""
    method = start_method()
    running: dict[Connection, BaseProcess] = {}
    processes: list[BaseProcess] = []
    try:
        for number in range(workers):
            receiver, sender = multiprocessing.get_context(method).Pipe(duplex=False)
            share = list(shards[number::workers])
            start_process(
                method, _work, (plan.dataset.prefix, plan.cutting, plan.chunk_ends, share, sender), processes.append
            )
            sender.close()
            running[receiver] = processes[-1]
        while running:
            for receiver in [ready for ready in wait(list(running)) if isinstance(ready, Connection)]:
                _receive_report(receiver, running.pop(receiver))
    finally:
        stop_processes(processes)


def _receive_report(receiver: Connection, process: BaseProcess) -> None:
    try:
        report = json.loads(receiver.recv_bytes())
    except (EOFError, OSError) as failure:
        title = f"the process {process.pid}, which wrote shards,"
        raise exit_error(title, process, workers_flag="--num-workers") from failure
    raise_failure(report)


def _work(prefix: str, cutting: Cutting, chunk_ends: Numbers, shards: Sequence[_Shard], reports: Connection) -> None:
    """The body of a process: writes its shards, then reports the outcome."""
    enter_worker()
    report = {}
    try:
        plan = WindowPlan(IndexedDataset(prefix), cutting, chunk_ends)
        for shard in shards:
            _write_shard(plan, shard)
    except MegatronError as failure:
        report = failure_message(failure)
    reports.send_bytes(json.dumps(report).encode())
