"""Worker processes that encode blocks, and their results in the order of the blocks.

Over one pair of pipes a worker, blocks go out and the lengths of the documents come back. The ids stay with the worker
until the parent, which alone knows the order, says at which offset of the unfinished file they belong; the worker then
writes them there itself. At most two blocks wait at each worker and a bounded number of results wait for their turn, so
memory stays flat however uneven the blocks are. A worker that dies is noticed at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron.corpus.inputs.lines import BadLine
from megatron.corpus.inputs.sources import Block, as_block_data
from megatron.corpus.preprocess.encode import EncodedBlock, EncodedKey, EncodeOptions, Encoder
from megatron.corpus.workers.pipes import can_write, read_exactly, wait_for, write_all
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
from megatron.data.formats.atomic_files import start_write_back, storage_error
from megatron.errors import MegatronError

if TYPE_CHECKING:
    from typing_extensions import Self

_BLOCKS_PER_WORKER = 2
_PIPE_BYTES = 1 << 20


@dataclass
class _Worker:
    """One process, the pipe ends on this side, the numbers of the blocks it has, and of how many results it was told
    a place that it has not written to yet.
    """

    index: int
    process: BaseProcess
    outgoing: Connection
    incoming: Connection
    blocks: list[int] = field(default_factory=list)
    unplaced: int = 0

    @property
    def title(self) -> str:
        return f"preprocessing worker {self.index} (pid {self.process.pid})"

    def tell(self, message: dict[str, Any]) -> None:
        """Sends a short message."""
        self.wait_to_write()
        self.outgoing.send_bytes(json.dumps(message).encode())

    def wait_to_write(self) -> None:
        """Waits until the worker empties its pipe."""
        wait_for(partial(can_write, self.outgoing), [(self.title, self.process.pid)])

    def wait_to_read(self) -> None:
        """Waits until the worker has written something."""
        wait_for(partial(wait, [self.incoming]), [(self.title, self.process.pid)])


class WorkerPool:
    """Processes that encode, started one by one as blocks arrive; use as a context manager.

    Where the system allows it they are forked and inherit the loaded tokenizer: a start takes milliseconds and its
    memory is shared. A process with several threads is not forked; its workers load the tokenizer, but do not check
    it again.

    Args:
        encoder: what every worker encodes with.
        workers: most processes.
        start_method: "fork" or "spawn"; decided here if left out.
    """

    def __init__(self, encoder: Encoder, workers: int, start_method: str | None = None) -> None:
        self._encoder = encoder
        self._most_workers = workers
        self._start_method = start_method
        self._workers: list[_Worker] = []

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

    def encode(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, EncodedBlock]]:
        """Results of the blocks, in their order.

        The ids stay with the workers: `place` of each result must be called, or the result dropped for good by leaving
        the pool. When the iterator ends, all ids stand where they were placed.

        Raises:
            WorkerError: a worker died; the text names it.
            DataError: a block could not be read.
            StorageError: ids could not be written.
        """
        most_under_way = (_BLOCKS_PER_WORKER + 1) * self._most_workers
        yield from in_order(blocks, most_under_way, self._has_room, self._send, self._receive)
        while any(worker.unplaced for worker in self._workers):
            self._receive({})

    def _has_room(self) -> bool:
        return len(self._workers) < self._most_workers or any(
            len(worker.blocks) < _BLOCKS_PER_WORKER for worker in self._workers
        )

    def _freest(self) -> _Worker:
        """The worker with the fewest blocks; a new one if all have some and there may be more."""
        if len(self._workers) < self._most_workers and all(worker.blocks for worker in self._workers):
            self._start()
        return min(self._workers, key=lambda worker: len(worker.blocks))

    def _start(self) -> None:
        method = self._start_method or start_method()
        context = multiprocessing.get_context(method)
        task_reader, task_writer = context.Pipe(duplex=False)
        result_reader, result_writer = context.Pipe(duplex=False)
        _widen(task_writer)
        _widen(result_writer)
        forked = method == "fork"
        encoder = self._encoder
        ours = [task_writer, result_reader]
        ours += [end for worker in self._workers for end in (worker.outgoing, worker.incoming)]
        words = (
            task_reader,
            result_writer,
            encoder if forked else (encoder.options, encoder.tokenizer.library),
            ours if forked else [],
        )

        def keep(process: BaseProcess) -> None:
            self._workers.append(_Worker(len(self._workers), process, task_writer, result_reader))

        start_process(method, _work, words, keep)
        task_reader.close()
        result_writer.close()

    def close(self) -> None:
        """Ends the workers, by force if need be."""
        for worker in self._workers:
            worker.outgoing.close()
        stop_processes(worker.process for worker in self._workers)
        for worker in self._workers:
            worker.incoming.close()
        self._workers.clear()

    def _send(self, number: int, block: Block) -> None:
        worker = self._freest()
        header = {"source": block.source, "start": block.start, "size": block.size, "layout": block.layout}
        header["data_bytes"] = None if block.data is None else len(block.data)
        try:
            worker.tell(header)
            if block.data is not None:
                write_all(worker.outgoing, memoryview(block.data), worker.wait_to_write)
        except OSError as failure:
            raise self._death(worker) from failure
        worker.blocks.append(number)

    def _receive(self, waiting: dict[int, EncodedBlock]) -> None:
        """Waits until a worker has a result or dies, and takes in what there is."""
        ends = [worker.incoming for worker in self._workers] + [worker.process.sentinel for worker in self._workers]
        busy = [(worker.title, worker.process.pid) for worker in self._workers if worker.blocks or worker.unplaced]
        readable = wait_for(partial(wait, ends), busy)
        for worker in self._workers:
            try:
                if worker.incoming in readable:
                    self._take_in(worker, waiting)
                elif worker.process.sentinel in readable:
                    raise self._death(worker)
            except (EOFError, ConnectionError) as failure:
                raise self._death(worker) from failure

    def _take_in(self, worker: _Worker, waiting: dict[int, EncodedBlock]) -> None:
        header = json.loads(worker.incoming.recv_bytes())
        raise_failure(header)
        if "placed" in header:
            worker.unplaced -= 1
        else:
            waiting[worker.blocks.pop(0)] = _receive_result(header, worker, partial(self._place, worker))

    def _place(self, worker: _Worker, places: Sequence[tuple[str, int]]) -> None:
        """Tells a worker where the ids of its oldest result belong."""
        try:
            worker.tell({"places": places})
        except OSError as failure:
            raise self._death(worker) from failure
        worker.unplaced += 1

    def _death(self, worker: _Worker) -> MegatronError:
        try:  # what it had to say before it went
            while worker.incoming.poll():
                self._take_in(worker, {})
        except MegatronError as failure:
            return failure
        except (EOFError, OSError):
            pass
        return death_of(worker.title, worker.process)


def _work(
    tasks: Connection,
    results: Connection,
    encoding: Encoder | tuple[EncodeOptions, str],
    inherited: list[Connection],
) -> None:
    """The body of a worker process: blocks in, ids out, until the pipe closes."""
    enter_worker(inherited)
    arrived: queue.SimpleQueue[Block | list[tuple[str, int]] | None] = queue.SimpleQueue()
    threading.Thread(target=_take_tasks, args=(tasks, arrived), daemon=True).start()
    unplaced: deque[EncodedBlock] = deque()
    try:
        encoder = encoding if isinstance(encoding, Encoder) else Encoder(*encoding)
        while (task := arrived.get()) is not None:
            if isinstance(task, Block):
                encoded = encoder.encode(task)
                _send_result(results, encoded)
                unplaced.append(encoded)
                del task, encoded
            else:
                _write_ids(unplaced.popleft(), task)
                results.send_bytes(b'{"placed": 1}')
    except MegatronError as failure:
        _say(results, failure_message(failure))
    except (BrokenPipeError, ConnectionError):
        os._exit(1)


def _take_tasks(tasks: Connection, arrived: queue.SimpleQueue[Block | list[tuple[str, int]] | None]) -> None:
    """Empties the pipe as fast as it fills, so that the parent never waits here while this process waits for it."""
    try:
        while True:
            header = json.loads(tasks.recv_bytes())
            if "places" in header:
                arrived.put(header["places"])
                continue
            size = header["data_bytes"]
            data = None if size is None else as_block_data(read_exactly(tasks, size))
            arrived.put(Block(header["source"], header["start"], header["size"], data, 0, header["layout"]))
    except (EOFError, OSError):
        arrived.put(None)


def _write_ids(encoded: EncodedBlock, places: Sequence[tuple[str, int]]) -> None:
    """Writes the ids of each key to their place in the unfinished `.bin` file."""
    for key, (path, offset) in zip(encoded.keys, places, strict=True):
        if key.ids is None or not key.ids.size:
            continue
        try:
            descriptor = os.open(path, os.O_WRONLY)
            try:
                data, position = key.ids.view(np.uint8).data, offset
                while data.nbytes:
                    count = os.pwrite(descriptor, data, position)
                    data, position = data[count:], position + count
                start_write_back(descriptor, offset, key.ids.nbytes)
            finally:
                os.close(descriptor)
        except OSError as failure:
            raise storage_error(Path(path), failure) from failure


def _send_result(results: Connection, encoded: EncodedBlock) -> None:
    header = {
        "keys": [[None if table is None else table.nbytes for table in _tables(key)] for key in encoded.keys],
        "lines": encoded.lines,
        "empty": encoded.empty,
        "bad": [[bad.line, bad.offset, bad.reason] for bad in encoded.bad],
        "bad_count": encoded.bad_count,
    }
    results.send_bytes(json.dumps(header).encode())
    for key in encoded.keys:
        for table in _tables(key):
            if table is not None:
                write_all(results, table.view(np.uint8).data)


def _tables(key: EncodedKey) -> tuple[npt.NDArray[np.int64] | None, ...]:
    return key.lengths, key.sequences_per_document


def _receive_result(
    header: dict[str, Any], worker: _Worker, place: Callable[[Sequence[tuple[str, int]]], None]
) -> EncodedBlock:
    def table(size: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(read_exactly(worker.incoming, size, worker.wait_to_read), np.int64)

    keys = [
        EncodedKey(None, table(lengths), None if documents is None else table(documents))
        for lengths, documents in header["keys"]
    ]
    bad = tuple(BadLine(*entry) for entry in header["bad"])
    return EncodedBlock(tuple(keys), header["lines"], header["empty"], bad, header["bad_count"], place)


def _say(results: Connection, message: dict[str, Any]) -> None:
    try:
        results.send_bytes(json.dumps(message).encode())
    except OSError:
        return


def _widen(pipe: Connection) -> None:
    """Asks for a larger pipe where the system has that (Linux): fewer switches between the processes."""
    try:
        import fcntl

        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, AttributeError, OSError):
        return
