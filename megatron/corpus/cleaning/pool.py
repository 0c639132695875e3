"""Worker processes that clean blocks, and their results in the order of the blocks.

A worker has one block at a time, so neither side ever waits for the other to read; results wait for their turn in a
window of a few blocks a worker. What crosses the pipes is JSON and arrays. A worker that dies is noticed at once.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.corpus.cleaning.cleaner import Changed, CleanedBlock, Cleaner, Dropped
from megatron.corpus.cleaning.contamination import EvaluationSets
from megatron.corpus.cleaning.documents.options import CleanOptions
from megatron.corpus.inputs.sources import Block
from megatron.corpus.workers.processes import (
    death_of,
    enter_worker,
    failure_message,
    in_order,
    raise_failure,
    start_method,
    start_process,
    stop_processes,
)
from megatron.errors import MegatronError

if TYPE_CHECKING:
    from typing_extensions import Self

_BLOCKS_PER_WORKER = 3
_Cleaning = tuple[CleanOptions, EvaluationSets | None, bool]


@dataclass
class _Worker:
    """One process, the pipe end on this side, and the block it works on."""

    index: int
    process: BaseProcess
    pipe: Connection
    block: int | None = None


@dataclass
class CleaningPool:
    """Processes that clean, started one by one as blocks arrive; use as a context manager.

    Args:
        cleaner: what every worker cleans with; forked workers inherit it, spawned ones make their own.
        most_workers: most processes.
        method: "fork" or "spawn"; decided here if left out.
    """

    cleaner: Cleaner
    most_workers: int
    method: str | None = None
    _workers: list[_Worker] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """The process ids of the workers that were started."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def clean(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, CleanedBlock]]:
        """Results of the blocks, in their order.

        Raises:
            WorkerError: a worker died; the text names it.
            DataError: a block could not be read.
        """
        most_under_way = _BLOCKS_PER_WORKER * self.most_workers
        return in_order(blocks, most_under_way, self._has_room, self._send, self._receive)

    def close(self) -> None:
        """Ends the workers, by force if need be."""
        for worker in self._workers:
            worker.pipe.close()
        stop_processes(worker.process for worker in self._workers)
        self._workers.clear()

    def _has_room(self) -> bool:
        return len(self._workers) < self.most_workers or any(worker.block is None for worker in self._workers)

    def _idle(self) -> _Worker:
        """A worker without a block; a new one if all have one."""
        return next((worker for worker in self._workers if worker.block is None), None) or self._start()

    def _start(self) -> _Worker:
        method = self.method or start_method()
        ours, theirs = multiprocessing.get_context(method).Pipe()
        forked = method == "fork"
        cleaner = self.cleaner
        words = (
            theirs,
            cleaner if forked else (cleaner.options, cleaner.evaluation, cleaner.counts),
            [ours, *(worker.pipe for worker in self._workers)] if forked else [],
        )
        start_process(
            method, _work, words, lambda process: self._workers.append(_Worker(len(self._workers), process, ours))
        )
        theirs.close()
        return self._workers[-1]

    def _send(self, number: int, block: Block) -> None:
        worker = self._idle()
        header = {name: getattr(block, name) for name in ("source", "start", "size", "layout")}
        try:
            worker.pipe.send_bytes(json.dumps({**header, "has_data": block.data is not None}).encode())
            if block.data is not None:
                worker.pipe.send_bytes(block.data)
        except OSError as failure:
            raise self._death(worker) from failure
        worker.block = number

    def _receive(self, results: dict[int, CleanedBlock]) -> None:
        """Waits until a worker has a result or dies, and takes in what there is."""
        ready = wait([worker.pipe for worker in self._workers] + [worker.process.sentinel for worker in self._workers])
        for worker in self._workers:
            try:
                if worker.pipe in ready:
                    results[worker.block or 0] = _receive_result(worker.pipe)
                    worker.block = None
                elif worker.process.sentinel in ready:
                    raise self._death(worker)
            except (EOFError, ConnectionError) as failure:
                raise self._death(worker) from failure

    def _death(self, worker: _Worker) -> MegatronError:
        try:  # what it had to say before it went
            while worker.pipe.poll():
                _receive_result(worker.pipe)
        except MegatronError as failure:
            return failure
        except (EOFError, OSError):
            pass
        return death_of(f"cleaning worker {worker.index} (pid {worker.process.pid})", worker.process)


def _work(pipe: Connection, cleaning: Cleaner | _Cleaning, inherited: list[Connection]) -> None:
    """The body of a worker process: blocks in, results out, until the pipe closes."""
    enter_worker(inherited)
    try:
        cleaner = cleaning if isinstance(cleaning, Cleaner) else Cleaner(*cleaning)
        while True:
            header = json.loads(pipe.recv_bytes())
            data = pipe.recv_bytes() if header.pop("has_data") else None
            _send_result(pipe, cleaner.clean(Block(**header, data=data, input_bytes=0)))
    except MegatronError as failure:
        pipe.send_bytes(json.dumps(failure_message(failure)).encode())
    except (EOFError, ConnectionError):
        return


def _send_result(pipe: Connection, cleaned: CleanedBlock) -> None:
    """Plain fields go as JSON, then the arrays and bytes one by one."""
    header: dict[str, Any] = {}
    heavy: list[Any] = []
    for name in (entry.name for entry in fields(cleaned)):
        value = getattr(cleaned, name)
        if isinstance(value, bytes):
            header[name] = "bytes"
            heavy.append(value)
        elif isinstance(value, np.ndarray):
            header[name] = [value.dtype.str, list(value.shape)]
            heavy.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    counts = {"documents": cleaned.documents, "dropped": cleaned.dropped, "changed": cleaned.changed}
    pipe.send_bytes(json.dumps({"plain": counts, "heavy": header}).encode("utf-8"))
    for value in heavy:
        pipe.send_bytes(value)


def _receive_result(pipe: Connection) -> CleanedBlock:
    header = json.loads(pipe.recv_bytes())
    raise_failure(header)
    plain = header["plain"]
    cleaned = CleanedBlock(
        plain["documents"],
        [Dropped(*entry) for entry in plain["dropped"]],
        [Changed(*entry) for entry in plain["changed"]],
    )
    for name, kind in header["heavy"].items():
        data = pipe.recv_bytes()
        setattr(cleaned, name, data if kind == "bytes" else np.frombuffer(data, kind[0]).reshape(kind[1]))
    return cleaned
