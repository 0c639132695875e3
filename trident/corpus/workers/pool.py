"""The pool of worker processes for all work on blocks; results come in the order of the blocks.

Each worker has a pair of pipes for blocks and results: a line of JSON, then buffers without a frame. Work may keep part
of a result in the worker (token ids, whose offset in the file only the parent knows) and finish it after a reply. At
most two blocks are queued per worker and a bounded number of results in total, so memory stays flat however uneven the
blocks are. The exit of a worker is detected at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from megatron.errors import MegatronError
from trident.corpus.inputs.block import InputBlock, as_block_data
from trident.corpus.workers.pipes import can_write, read_from_pipe, wait_for, write_to_pipe
from trident.corpus.workers.processes import (
    enter_worker,
    exit_error,
    failure_message,
    raise_failure,
    start_method,
    start_process,
    stop_processes,
    usable_cores,
)

if TYPE_CHECKING:
    from typing_extensions import Self

Result = TypeVar("Result")

_BLOCKS_PER_WORKER = 2
_PIPE_BYTES = 1 << 20


class Message(NamedTuple):
    """A result in the format of the pipes.

    Args:
        facts: JSON-serialisable values.
        buffers: bytes-like objects, sent unchanged.
    """

    facts: dict[str, Any]
    buffers: Sequence[Any]


class BlockWork(ABC, Generic[Result]):
    """The work on every block; forked workers inherit it, spawned ones rebuild it.

    Attributes:
        title: name of a worker in messages, for example "preprocessing".
        is_finished_by_reply: the worker keeps each result until the parent's reply.
    """

    title = ""
    is_finished_by_reply = False

    @abstractmethod
    def recipe(self) -> tuple[Callable[..., BlockWork[Result]], tuple[Any, ...]]:
        """Returns a class or function and its arguments, which rebuild this work in a spawned process."""

    @abstractmethod
    def run(self, block: InputBlock) -> Result:
        """Does the work on one block."""

    @abstractmethod
    def pack(self, result: Result) -> Message:
        """In the worker: returns the message for a result."""

    @abstractmethod
    def unpack(self, facts: dict[str, Any], buffers: list[bytearray], reply: Callable[[Any], None]) -> Result:
        """In the parent: returns the result of a message; `reply` takes a JSON-serialisable value."""

    def finish(self, result: Result, reply: Any) -> None:
        """In the worker: finishes a result with the parent's reply."""


@contextmanager
def run_blocks(
    work: BlockWork[Result], blocks: Iterable[InputBlock], workers: int
) -> Iterator[Iterator[tuple[InputBlock, Result]]]:
    """Works on all blocks, in this process if `workers` is 1, and yields the results in the order of the blocks."""
    if workers == 1:
        yield ((block, work.run(block)) for block in blocks)
        return
    with WorkerPool(work, workers) as pool:
        yield pool.run(blocks)


def choose_workers(blocks: Iterator[InputBlock], maximum_workers: int) -> tuple[Iterator[InputBlock], int]:
    """Returns the same blocks and the number of workers: 1 for a single block, at most the number of cores."""
    first = list(islice(blocks, 2))
    return chain(first, blocks), min(maximum_workers, usable_cores()) if len(first) > 1 else 1


@dataclass
class _Worker:
    """One process with this side's pipe ends.

    Args:
        blocks: numbers of its blocks.
        unfinished: results with a reply that are not finished yet.
    """

    title: str
    process: BaseProcess
    outgoing: Connection
    incoming: Connection
    blocks: list[int] = field(default_factory=list)
    unfinished: int = 0

    @property
    def identity(self) -> tuple[str, int | None]:
        return f"{self.title} (pid {self.process.pid})", self.process.pid

    def send(self, message: dict[str, Any]) -> None:
        """Sends a short message."""
        self.wait_to_write()
        self.outgoing.send_bytes(json.dumps(message).encode())

    def wait_to_write(self) -> None:
        """Waits until the pipe has room."""
        wait_for(partial(can_write, self.outgoing), [self.identity])

    def wait_to_read(self) -> None:
        """Waits until the worker has written something."""
        wait_for(partial(wait, [self.incoming]), [self.identity])


class WorkerPool(Generic[Result]):
    """Processes that work on blocks, started one by one as blocks arrive; use as a context manager.

    If possible they are forked and inherit loaded data: a start takes milliseconds and memory is shared. A process with
    several threads is not forked.

    Args:
        method: "fork" or "spawn"; by default the result of `start_method`.
    """

    def __init__(self, work: BlockWork[Result], maximum_workers: int, method: str | None = None) -> None:
        self._work = work
        self._maximum_workers = maximum_workers
        self._method = method
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """The process ids of the started workers."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def run(self, blocks: Iterable[InputBlock]) -> Iterator[tuple[InputBlock, Result]]:
        """Yields the results of the blocks, in their order.

        At the end of the iterator, every result with a reply is finished.

        Raises:
            WorkerError: a worker exited unexpectedly; the message names it.
            MegatronError: an error of the work in a worker.
        """
        maximum_under_way = (_BLOCKS_PER_WORKER + 1) * self._maximum_workers
        source = iter(blocks)
        sent: dict[int, InputBlock] = {}
        results: dict[int, Result] = {}
        next_out = next_in = 0
        is_exhausted = False
        while True:
            while not is_exhausted and next_in - next_out < maximum_under_way and self._has_room():
                block = next(source, None)
                if block is None:
                    is_exhausted = True
                    break
                self._send(next_in, block)
                sent[next_in] = block if block.data is None else replace(block, data=None)
                next_in += 1
            if next_out in results:
                yield sent.pop(next_out), results.pop(next_out)
                next_out += 1
            elif is_exhausted and next_out == next_in:
                break
            else:
                self._receive(results)
        while any(worker.unfinished for worker in self._workers):
            self._receive({})

    def close(self) -> None:
        """Stops the workers, by force if necessary."""
        for worker in self._workers:
            worker.outgoing.close()
        stop_processes(worker.process for worker in self._workers)
        for worker in self._workers:
            worker.incoming.close()
        self._workers.clear()

    def _has_room(self) -> bool:
        return len(self._workers) < self._maximum_workers or any(
            len(worker.blocks) < _BLOCKS_PER_WORKER for worker in self._workers
        )

    def _least_busy(self) -> _Worker:
        """Returns the worker with the fewest blocks; a new one if all have blocks and the pool is not full."""
        if len(self._workers) < self._maximum_workers and all(worker.blocks for worker in self._workers):
            self._start()
        return min(self._workers, key=lambda worker: len(worker.blocks))

    def _start(self) -> None:
        method = self._method or start_method()
        context = multiprocessing.get_context(method)
        task_reader, task_writer = context.Pipe(duplex=False)
        result_reader, result_writer = context.Pipe(duplex=False)
        _widen(task_writer)
        _widen(result_writer)
        is_forked = method == "fork"
        ours = [task_writer, result_reader]
        ours += [end for worker in self._workers for end in (worker.outgoing, worker.incoming)]
        values = (
            task_reader,
            result_writer,
            self._work if is_forked else self._work.recipe(),
            ours if is_forked else [],
        )

        def keep(process: BaseProcess) -> None:
            title = f"{self._work.title} worker {len(self._workers)}"
            self._workers.append(_Worker(title, process, task_writer, result_reader))

        start_process(method, _work_until_closed, values, keep)
        task_reader.close()
        result_writer.close()

    def _send(self, number: int, block: InputBlock) -> None:
        worker = self._least_busy()
        header = {"source": block.source, "start": block.start, "size": block.size, "layout": block.layout}
        header["data_bytes"] = None if block.data is None else len(block.data)
        try:
            worker.send(header)
            if block.data is not None:
                write_to_pipe(worker.outgoing, block.data, worker.wait_to_write)
        except OSError as failure:
            raise self._worker_exit_error(worker) from failure
        worker.blocks.append(number)

    def _receive(self, results: dict[int, Result]) -> None:
        """Waits until a worker has a result or exits, and receives all available results."""
        ends = [worker.incoming for worker in self._workers] + [worker.process.sentinel for worker in self._workers]
        busy = [worker.identity for worker in self._workers if worker.blocks or worker.unfinished]
        readable = wait_for(partial(wait, ends), busy)
        for worker in self._workers:
            try:
                if worker.incoming in readable:
                    self._accept(worker, results)
                elif worker.process.sentinel in readable:
                    raise self._worker_exit_error(worker)
            except (EOFError, ConnectionError) as failure:
                raise self._worker_exit_error(worker) from failure

    def _accept(self, worker: _Worker, results: dict[int, Result]) -> None:
        header = json.loads(worker.incoming.recv_bytes())
        raise_failure(header)
        if "finished" in header:
            worker.unfinished -= 1
            return
        buffers = [read_from_pipe(worker.incoming, size, worker.wait_to_read) for size in header["buffers"]]
        results[worker.blocks.pop(0)] = self._work.unpack(header["facts"], buffers, partial(self._reply, worker))

    def _reply(self, worker: _Worker, reply: Any) -> None:
        """Replies to the worker's oldest result without a reply."""
        try:
            worker.send({"reply": reply})
        except OSError as failure:
            raise self._worker_exit_error(worker) from failure
        worker.unfinished += 1

    def _worker_exit_error(self, worker: _Worker) -> MegatronError:
        try:  # its last report
            while worker.incoming.poll():
                self._accept(worker, {})
        except MegatronError as failure:
            return failure
        except (EOFError, OSError):
            pass
        return exit_error(worker.identity[0], worker.process)


class _Reply(NamedTuple):
    """The parent's reply to the oldest pending result of a worker."""

    value: Any


_Tasks = queue.SimpleQueue["InputBlock | _Reply | None"]


def _work_until_closed(
    tasks: Connection,
    results: Connection,
    work: BlockWork[Result] | tuple[Callable[..., BlockWork[Result]], tuple[Any, ...]],
    inherited: list[Connection],
) -> None:
    """The body of a worker process: blocks in, results out, until the pipe closes."""
    enter_worker(inherited)
    arrived: _Tasks = queue.SimpleQueue()
    threading.Thread(target=_take_tasks, args=(tasks, arrived), daemon=True).start()
    unfinished: deque[Result] = deque()
    try:
        worker_work = work if isinstance(work, BlockWork) else work[0](*work[1])
        while (task := arrived.get()) is not None:
            if isinstance(task, InputBlock):
                result = worker_work.run(task)
                _send_message(results, worker_work.pack(result))
                if worker_work.is_finished_by_reply:
                    unfinished.append(result)
                del task, result
            else:
                worker_work.finish(unfinished.popleft(), task.value)
                results.send_bytes(b'{"finished": 1}')
    except MegatronError as failure:
        _report(results, failure_message(failure))
    except (BrokenPipeError, ConnectionError):
        os._exit(1)


def _take_tasks(tasks: Connection, arrived: _Tasks) -> None:
    """Empties the pipe as fast as it fills, so that parent and worker never wait for each other."""
    try:
        while True:
            header = json.loads(tasks.recv_bytes())
            if "reply" in header:
                arrived.put(_Reply(header["reply"]))
                continue
            size = header["data_bytes"]
            data = None if size is None else as_block_data(read_from_pipe(tasks, size))
            arrived.put(InputBlock(header["source"], header["start"], header["size"], data, 0, header["layout"]))
    except (EOFError, OSError):
        arrived.put(None)


def _send_message(results: Connection, message: Message) -> None:
    buffers = [memoryview(buffer).cast("B") for buffer in message.buffers]
    header = {"facts": message.facts, "buffers": [buffer.nbytes for buffer in buffers]}
    results.send_bytes(json.dumps(header).encode())
    for buffer in buffers:
        write_to_pipe(results, buffer)


def _report(results: Connection, message: dict[str, Any]) -> None:
    try:
        results.send_bytes(json.dumps(message).encode())
    except OSError:
        return


def _widen(pipe: Connection) -> None:
    """Enlarges a pipe on Linux, for fewer context switches."""
    try:
        import fcntl

        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, AttributeError, OSError):
        return
