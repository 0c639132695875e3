"""Worker processes that encode blocks, and their results in the order of the blocks.

Blocks go out and ids come back as plain bytes over one pair of pipes a worker. At most two blocks wait at each worker
and a bounded number of results wait for their turn, so memory stays flat however uneven the blocks are. A worker that
dies is noticed at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron import log
from megatron.corpus.encode import EncodedBlock, EncodedKey, EncodeOptions, Encoder
from megatron.corpus.lines import BadLine
from megatron.corpus.sources import Block
from megatron.errors import ConfigError, DataError, ExitCode, MegatronError, StorageError

if TYPE_CHECKING:
    from typing_extensions import Self

_BLOCKS_PER_WORKER = 2
_STOP_SECONDS = 2.0
_PIPE_BYTES = 1 << 20


class WorkerError(MegatronError):
    """A preprocessing worker died or failed; nothing of the run was published."""

    exit_code = ExitCode.STORAGE


_FAILURES: dict[str, type[MegatronError]] = {
    "ConfigError": ConfigError,
    "DataError": DataError,
    "StorageError": StorageError,
    "WorkerError": WorkerError,
}


@dataclass
class _Worker:
    """One process, the pipe ends on this side, and the numbers of the blocks it has."""

    index: int
    process: BaseProcess
    outgoing: Connection
    incoming: Connection
    blocks: list[int]

    @property
    def title(self) -> str:
        return f"preprocessing worker {self.index} (pid {self.process.pid})"


class WorkerPool:
    """Processes that encode; use as a context manager.

    Args:
        options: what every worker encodes with.
        workers: number of processes.
    """

    def __init__(self, options: EncodeOptions, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._dtype: np.dtype[Any] | None = None
        try:
            for index in range(workers):
                task_reader, task_writer = context.Pipe(duplex=False)
                result_reader, result_writer = context.Pipe(duplex=False)
                _widen(task_writer)
                _widen(result_writer)
                process = context.Process(target=_work, args=(index, task_reader, result_writer, options), daemon=True)
                process.start()
                task_reader.close()
                result_writer.close()
                self._workers.append(_Worker(index, process, task_writer, result_reader, []))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """The workers' process ids."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def wait_until_ready(self) -> np.dtype[Any]:
        """Waits for the first worker that has loaded the tokenizer; returns the dtype of the ids.

        Raises:
            ConfigError: the tokenizer's flags are wrong.
            DataError: the tokenizer's files are damaged.
            WorkerError: a worker died.
        """
        while self._dtype is None:
            self._receive({})
        return self._dtype

    def encode(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, EncodedBlock]]:
        """Results of the blocks, in their order.

        Raises:
            WorkerError: a worker died; the text names it.
            DataError: a block could not be read.
        """
        source = iter(blocks)
        waiting: dict[int, EncodedBlock] = {}
        sent: dict[int, Block] = {}
        next_out = next_in = 0
        exhausted = False
        window = (_BLOCKS_PER_WORKER + 1) * len(self._workers)
        while True:
            while not exhausted and next_in - next_out < window:
                worker = min(self._workers, key=lambda worker: len(worker.blocks))
                if len(worker.blocks) >= _BLOCKS_PER_WORKER:
                    break
                block = next(source, None)
                if block is None:
                    exhausted = True
                    break
                self._send(worker, next_in, block)
                sent[next_in] = (
                    block
                    if block.data is None
                    else Block(block.source, block.start, block.size, None, block.input_bytes)
                )
                next_in += 1
            if next_out in waiting:
                yield sent.pop(next_out), waiting.pop(next_out)
                next_out += 1
            elif exhausted and next_out == next_in:
                return
            else:
                self._receive(waiting)

    def close(self) -> None:
        """Ends the workers, by force if need be."""
        for worker in self._workers:
            worker.outgoing.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(_STOP_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.incoming.close()
        self._workers.clear()

    def _send(self, worker: _Worker, number: int, block: Block) -> None:
        header = {"source": block.source, "start": block.start, "size": block.size, "has_data": block.data is not None}
        try:
            worker.outgoing.send_bytes(json.dumps(header).encode())
            if block.data is not None:
                _write_all(worker.outgoing, memoryview(block.data))
        except OSError as failure:
            raise self._death(worker) from failure
        worker.blocks.append(number)

    def _receive(self, waiting: dict[int, EncodedBlock]) -> None:
        """Waits until a worker has a result or dies, and takes in what there is."""
        readable = wait(
            [worker.incoming for worker in self._workers] + [worker.process.sentinel for worker in self._workers]
        )
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
        if "failure" in header:
            raise _FAILURES[header["failure"]](header["text"])
        if "dtype" in header:
            self._dtype = np.dtype(header["dtype"])
        else:
            waiting[worker.blocks.pop(0)] = _receive_result(header, worker.incoming)

    def _death(self, worker: _Worker) -> MegatronError:
        try:  # what it had to say before it went
            while worker.incoming.poll():
                self._take_in(worker, {})
        except MegatronError as failure:
            return failure
        except (EOFError, OSError):
            pass
        worker.process.join(_STOP_SECONDS)
        code = worker.process.exitcode
        how = (
            f"was killed by {_signal_name(-code)}" if code is not None and code < 0 else f"ended with exit code {code}"
        )
        return WorkerError(
            f"{worker.title} {how}; nothing was published. When the system was short of memory (see "
            "dmesg), use fewer --workers; "
            "then run the same command again."
        )


def _work(index: int, tasks: Connection, results: Connection, options: EncodeOptions) -> None:
    """The body of a worker process: blocks in, ids out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us
    if index > 0:  # what there is to say about the tokenizer is said once
        log.set_level("warning")
    arrived: queue.SimpleQueue[Block | None] = queue.SimpleQueue()
    threading.Thread(target=_take_tasks, args=(tasks, arrived), daemon=True).start()
    try:
        encoder = Encoder(options)
        results.send_bytes(json.dumps({"dtype": encoder.dtype.str}).encode())
        while (block := arrived.get()) is not None:
            _send_result(results, encoder.encode(block))
            del block
    except MegatronError as failure:
        kind = next((name for name, known in _FAILURES.items() if isinstance(failure, known)), "WorkerError")
        _say(results, {"failure": kind, "text": str(failure)})
    except (BrokenPipeError, ConnectionError):
        os._exit(1)


def _take_tasks(tasks: Connection, arrived: queue.SimpleQueue[Block | None]) -> None:
    """Empties the pipe as fast as it fills, so that the parent never waits here while this process waits for it."""
    try:
        while True:
            header = json.loads(tasks.recv_bytes())
            data = _read_exactly(tasks, header["size"]).tobytes() if header["has_data"] else None
            arrived.put(Block(header["source"], header["start"], header["size"], data, 0))
    except (EOFError, OSError):
        arrived.put(None)


def _send_result(results: Connection, encoded: EncodedBlock) -> None:
    header = {
        "keys": [[key.ids.dtype.str, key.ids.nbytes, key.lengths.nbytes] for key in encoded.keys],
        "lines": encoded.lines,
        "empty": encoded.empty,
        "bad": [[bad.line, bad.offset, bad.reason] for bad in encoded.bad],
        "bad_count": encoded.bad_count,
    }
    results.send_bytes(json.dumps(header).encode())
    for key in encoded.keys:
        _write_all(results, key.ids.view(np.uint8).data)
        _write_all(results, key.lengths.view(np.uint8).data)


def _receive_result(header: dict[str, Any], incoming: Connection) -> EncodedBlock:
    keys = []
    for dtype, ids_bytes, lengths_bytes in header["keys"]:
        ids = _read_exactly(incoming, ids_bytes).view(dtype)
        keys.append(EncodedKey(ids, _read_exactly(incoming, lengths_bytes).view(np.int64)))
    bad = tuple(BadLine(*entry) for entry in header["bad"])
    return EncodedBlock(tuple(keys), header["lines"], header["empty"], bad, header["bad_count"])


def _write_all(pipe: Connection, data: memoryview) -> None:
    """Writes bytes without a frame around them: the message before said how many there are."""
    while data.nbytes:
        data = data[os.write(pipe.fileno(), data) :]


def _read_exactly(pipe: Connection, size: int) -> npt.NDArray[np.uint8]:
    """Reads so many bytes straight into their place.

    Raises:
        EOFError: the other side went away.
    """
    data = np.empty(size, dtype=np.uint8)
    missing = data.data
    while missing.nbytes:
        count = os.readv(pipe.fileno(), [missing])
        if not count:
            raise EOFError("the pipe was closed")
        missing = missing[count:]
    return data


def _say(results: Connection, message: dict[str, Any]) -> None:
    try:
        results.send_bytes(json.dumps(message).encode())
    except OSError:
        return


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _widen(pipe: Connection) -> None:
    """Asks for a larger pipe where the system has that (Linux): fewer switches between the processes."""
    try:
        import fcntl

        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except (ImportError, AttributeError, OSError):
        return
