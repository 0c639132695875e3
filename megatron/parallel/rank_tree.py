"""Small messages between all ranks along a tree of TCP connections, for control and for background saves.

Rank `r` is connected to its parent `(r - 1) // 8` and to its children `8 r + 1` to `8 r + 8`: at most nine sockets
for any number of ranks, while a gloo group over all ranks opens one to each. A message takes at most `log8(ranks)` hops
each way: five for 16,384 ranks.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar, final

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

FANOUT = 8

Result = TypeVar("Result")
_HEADER = struct.Struct("!cQ")  # the kind of message, and the number of bytes that follow
_ENTRY = struct.Struct("!IQ")  # a rank, and the number of bytes gathered from it
_REDUCE, _BROADCAST, _GATHER = b"r", b"b", b"g"


def parent_of(rank: int) -> int:
    """The parent of a rank other than 0."""
    return (rank - 1) // FANOUT


def children_of(rank: int, size: int) -> range:
    """The children of a rank."""
    first = rank * FANOUT + 1
    return range(min(first, size), min(first + FANOUT, size))


@final
class RankTree:
    """A rank's connections in the tree.

    Every call is collective: all ranks make the same calls in the same order. A rank that fails closes its connections,
    which fails its neighbours and so all ranks.

    Args:
        parent: the connection to the parent; None on rank 0.
        children: the connection to each child, by its rank.
        limit_seconds: timeout of a call.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        parent: socket.socket | None,
        children: Mapping[int, socket.socket],
        limit_seconds: float,
    ) -> None:
        self._rank = rank
        self._size = size
        self._parent = parent
        self._children = dict(sorted(children.items()))
        self._limit_seconds = limit_seconds
        self._until = 0.0
        self._turn = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None
        for connection in self._connections():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def maximum(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The element-wise maximum over the arrays of all ranks, of equal shape and dtype."""
        return self._in_turn(lambda: self._reduce(values, np.maximum))

    def total(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The element-wise sum over the arrays of all ranks, added in the same order in every call."""
        return self._in_turn(lambda: self._reduce(values, np.add))

    def start_maximum(self, values: npt.NDArray[Any]) -> Future[npt.NDArray[Any]]:
        """As `maximum`, in a separate thread; later calls wait for it."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, f"tree of rank {self._rank}")
        started = self._executor.submit(self._run, lambda: self._reduce(values, np.maximum))
        self._last = started
        return started

    def broadcast(self, content: bytes, source: int = 0) -> bytes:
        """Returns the bytes of rank `source` on every rank; `content` of the others is ignored."""
        return self._in_turn(lambda: self._broadcast(content, source))

    def gather(self, content: bytes) -> list[bytes] | None:
        """Returns the bytes of every rank, in order, on rank 0, and None on the others."""
        return self._in_turn(lambda: self._gather(content))

    def close(self) -> None:
        """Closes the connections; a call that waits for one raises."""
        for connection in self._connections():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def _connections(self) -> list[socket.socket]:
        return [*([] if self._parent is None else [self._parent]), *self._children.values()]

    def _in_turn(self, call: Callable[[], Result]) -> Result:
        if self._last is not None and not self._last.done() and self._executor is not None:
            return self._executor.submit(self._run, call).result()
        return self._run(call)

    def _run(self, call: Callable[[], Result]) -> Result:
        with self._turn:
            self._until = time.monotonic() + self._limit_seconds
            return call()

    def _reduce(self, values: npt.NDArray[Any], combine: Callable[..., npt.NDArray[Any]]) -> npt.NDArray[Any]:
        total = np.asarray(values, order="C")
        for rank, connection in self._children.items():
            total = np.asarray(combine(total, self._array(self._receive(rank, connection, _REDUCE), total)))
        if self._parent is not None:
            self._send(parent_of(self._rank), self._parent, _REDUCE, total.tobytes())
            total = self._array(self._receive(parent_of(self._rank), self._parent, _REDUCE), total)
        for rank, connection in self._children.items():
            self._send(rank, connection, _REDUCE, total.tobytes())
        return total

    def _array(self, content: bytearray, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if len(content) != like.nbytes:
            self._disagree(f"{len(content)} bytes where this rank reduces {like.nbytes}")
        return np.frombuffer(content, dtype=like.dtype).reshape(like.shape)

    def _broadcast(self, content: bytes, source: int) -> bytes:
        # Up from the source to rank 0, and from there down to all ranks.
        message: bytes | bytearray = content
        below = source
        while below > self._rank and parent_of(below) != self._rank:
            below = parent_of(below)
        if below > self._rank:  # the source is below this rank
            message = self._receive(below, self._children[below], _BROADCAST)
        if self._parent is not None:
            if below >= self._rank:
                self._send(parent_of(self._rank), self._parent, _BROADCAST, message)
            message = self._receive(parent_of(self._rank), self._parent, _BROADCAST)
        for rank, connection in self._children.items():
            self._send(rank, connection, _BROADCAST, message)
        return bytes(message)

    def _gather(self, content: bytes) -> list[bytes] | None:
        bundle = bytearray(_ENTRY.pack(self._rank, len(content)) + content)
        for rank, connection in self._children.items():
            bundle += self._receive(rank, connection, _GATHER)
        if self._parent is not None:
            self._send(parent_of(self._rank), self._parent, _GATHER, bundle)
            return None
        contents, offset = [b""] * self._size, 0
        while offset < len(bundle):
            rank, size = _ENTRY.unpack_from(bundle, offset)
            offset += _ENTRY.size
            contents[rank] = bytes(bundle[offset : offset + size])
            offset += size
        return contents

    def _send(self, rank: int, connection: socket.socket, kind: bytes, content: bytes | bytearray) -> None:
        try:
            connection.settimeout(self._left_seconds())
            connection.sendall(_HEADER.pack(kind, len(content)))
            if content:
                connection.sendall(content)
        except OSError as failure:
            self._give_up(rank, failure)

    def _receive(self, rank: int, connection: socket.socket, kind: bytes) -> bytearray:
        try:
            sent, size = _HEADER.unpack(self._exactly(connection, _HEADER.size))
            if sent != kind:
                self._disagree(f"rank {rank} is in call {sent.decode('ascii', 'replace')!r}, this one in {kind!r}")
            return self._exactly(connection, size)
        except OSError as failure:
            self._give_up(rank, failure)

    def _exactly(self, connection: socket.socket, size: int) -> bytearray:
        content = bytearray(size)
        view, offset = memoryview(content), 0
        while offset < size:
            connection.settimeout(self._left_seconds())
            received = connection.recv_into(view[offset:])
            if not received:
                raise ConnectionResetError("the other end is closed")
            offset += received
        return content

    def _left_seconds(self) -> float:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _give_up(self, rank: int, failure: OSError) -> NoReturn:
        self.close()
        if isinstance(failure, TimeoutError):
            raise dist.DistNetworkError(
                f"Timed out waiting {self._limit_seconds * 1000:.0f}ms for rank {rank}"
            ) from failure
        raise dist.DistNetworkError(f"Connection closed by peer: rank {rank} ({failure})") from failure

    def _disagree(self, how: str) -> NoReturn:
        self.close()
        raise RuntimeError(f"The ranks do not make the same calls: {how}")
