"""Non-differentiable communication between ranks: sums, maxima, bytes and JSON, without pickle.

Except for `send` and `receive`, every function is collective over its axis; on an axis of size 1 it returns this
rank's own value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron import device
from megatron.parallel.mesh import Axis

# The kind of time that sends and receives of pipeline stages take.
TRANSFER = "transfer"

_LOST_PEER_TEXTS = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out waiting",  # a rank that hangs, once --distributed-timeout-minutes are over
)


class PendingMaximum:
    """An all-reduce in flight: the maximum of the ranks' integers; collective over the axis.

    Args:
        value: this rank's integer, from 0 to 2^31 - 1.
        axis: the participating ranks; its group must support CPU tensors, as `ParallelMesh.control` does.
    """

    def __init__(self, value: int, axis: Axis) -> None:
        self._word = torch.tensor([value], dtype=torch.int32)
        self._work: dist.Work | None = None
        if axis.size > 1:
            self._work = dist.all_reduce(self._word, op=dist.ReduceOp.MAX, group=axis.group, async_op=True)

    def wait(self) -> int:
        """Waits for all ranks and returns the maximum."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._word)


def all_reduce_sum(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sums `tensor` over the axis, in place, and returns it."""
    if axis.size > 1:
        with axis.timed():
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=axis.group)
    return tensor


def reduce_scatter_sum(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sums over the axis the part of `tensor` that falls to this rank, in place, and returns it.

    The other parts are not defined afterwards.

    Shapes: `[n]` with `n` a multiple of the axis's size `r`; the result, a view, `[n/r]`.
    """
    size = len(tensor) // axis.size
    part = tensor.narrow(0, axis.rank * size, size)
    if axis.size > 1:
        with axis.timed():
            dist.reduce_scatter_tensor(part, tensor, group=axis.group)
    return part


def all_reduce_max(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Takes the element-wise maximum of `tensor` over the axis, in place, and returns it."""
    if axis.size > 1:
        with axis.timed():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=axis.group)
    return tensor


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Overwrites `tensor` with the tensor of rank `source` of the axis, and returns it."""
    if axis.size > 1:
        with axis.timed():
            dist.broadcast(tensor, src=axis.ranks[source], group=axis.group)
    return tensor


def send(tensor: torch.Tensor, axis: Axis, destination: int) -> None:
    """Sends a tensor to rank `destination` of the axis, which calls `receive`; not collective."""
    dist.send(tensor.contiguous(), dst=axis.ranks[destination], group=axis.group)


def receive(tensor: torch.Tensor, axis: Axis, source: int) -> torch.Tensor:
    """Overwrites `tensor` with the one that rank `source` of the axis sends, of equal shape and dtype; returns it."""
    dist.recv(tensor, src=axis.ranks[source], group=axis.group)
    return tensor


class PendingMessage:
    """A tensor on its way between two ranks; its memory must not be written to before `wait` has returned.

    Args:
        tensor: what is sent, or where the values arrive.
    """

    def __init__(self, tensor: torch.Tensor, work: dist.Work | None, stopwatch_of: Axis) -> None:
        self._tensor, self._work, self._axis = tensor, work, stopwatch_of

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor:
        """Waits for the message, on a GPU only the work that is queued from now on; returns its tensor."""
        if self._work is not None:
            with self._axis.timed(TRANSFER):
                self._work.wait()
            self._work = None
        return self._tensor


def start_send(tensor: torch.Tensor, axis: Axis, destination: int) -> PendingMessage:
    """Sends a tensor to rank `destination` of the axis, which calls `receive` or `start_receive`, without waiting.

    Two ranks that send to each other begin their messages in the same order.
    """
    whole = tensor.contiguous()
    return PendingMessage(whole, dist.isend(whole, dst=axis.ranks[destination], group=axis.group), axis)


def start_receive(tensor: torch.Tensor, axis: Axis, source: int) -> PendingMessage:
    """Begins to receive what rank `source` of the axis sends, of equal shape and dtype; see `start_send`."""
    return PendingMessage(tensor, dist.irecv(tensor, src=axis.ranks[source], group=axis.group), axis)


def broadcast_bytes(content: bytes, axis: Axis, source: int = 0) -> bytes:
    """Returns the bytes of rank `source` of the axis on every rank; `content` of the other ranks is ignored."""
    if axis.size == 1:
        return content
    message_device = _message_device(axis)
    size = broadcast(torch.tensor([len(content)], dtype=torch.int64, device=message_device), axis, source)
    if axis.rank == source:
        message = _as_tensor(content).to(message_device)
    else:
        message = torch.empty(int(size), dtype=torch.uint8, device=message_device)
    return _as_bytes(broadcast(message, axis, source)) if int(size) else b""


def gather_bytes(content: bytes, axis: Axis, destination: int = 0) -> list[bytes] | None:
    """Returns the bytes of every rank of the axis, in axis order, on rank `destination`, and None on the others.

    Every rank sends its bytes plus an eight-byte length, once.
    """
    if axis.size == 1:
        return [content]
    message_device = _message_device(axis)
    own_size = torch.tensor([len(content)], dtype=torch.int64, device=message_device)
    if axis.rank != destination:
        dist.gather(own_size, dst=axis.ranks[destination], group=axis.group)
        if content:
            dist.send(_as_tensor(content).to(message_device), dst=axis.ranks[destination], group=axis.group)
        return None
    sizes = [torch.empty_like(own_size) for _ in range(axis.size)]
    dist.gather(own_size, sizes, dst=axis.ranks[destination], group=axis.group)
    contents = []
    for rank, size in enumerate(map(int, sizes)):
        if rank == destination or size == 0:
            contents.append(content if rank == destination else b"")
            continue
        message = torch.empty(size, dtype=torch.uint8, device=message_device)
        dist.recv(message, src=axis.ranks[rank], group=axis.group)
        contents.append(_as_bytes(message))
    return contents


def scatter_number(numbers: Sequence[int], axis: Axis, source: int = 0) -> int:
    """Returns this rank's entry of the list of rank `source` of the axis; the lists of other ranks are ignored."""
    if axis.size == 1:
        return numbers[0]
    message_device = _message_device(axis)
    own = torch.zeros(1, dtype=torch.int64, device=message_device)
    given = list(torch.tensor(numbers, dtype=torch.int64, device=message_device).split(1))
    dist.scatter(own, given if axis.rank == source else None, src=axis.ranks[source], group=axis.group)
    return int(own)


def broadcast_json(value: Any, axis: Axis, source: int = 0) -> Any:
    """Returns the JSON-serializable value of rank `source` of the axis on every rank; other values are ignored.

    The value always makes a round trip through JSON (tuples become lists), also on an axis of size 1.
    """
    content = json.dumps(value).encode() if axis.rank == source else b""
    return json.loads(broadcast_bytes(content, axis, source))


def all_gather_json(value: Any, axis: Axis) -> list[Any]:
    """Gathers a JSON-serializable value from every rank of the axis, in axis order, on every rank.

    The bytes a rank receives grow with the size of the axis; if one rank suffices, `gather_bytes` is cheaper.
    """
    gathered = gather_bytes(json.dumps(value).encode(), axis)
    values = None if gathered is None else [json.loads(content) for content in gathered]
    return list(broadcast_json(values, axis))


def is_lost_peer(failure: BaseException) -> bool:
    """Whether a collective failed because another rank ended or hangs, judging by gloo's and NCCL's error messages."""
    if isinstance(failure, dist.DistBackendError | dist.DistNetworkError):
        return True
    return isinstance(failure, RuntimeError) and any(text in str(failure) for text in _LOST_PEER_TEXTS)


def _message_device(axis: Axis) -> torch.device:
    """The device whose tensors the axis's backend can send."""
    return device.current_device() if dist.get_backend(axis.group) == "nccl" else torch.device("cpu")


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _as_bytes(message: torch.Tensor) -> bytes:
    return message.cpu().numpy().tobytes()
