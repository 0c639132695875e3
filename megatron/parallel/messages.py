"""Non-differentiable communication between ranks: sums, maxima, bytes and JSON, without pickle.

Except for `send` and `receive`, every function is collective over its axis; on an axis of size 1 it returns this
rank's own value. An axis with a tree, such as `ParallelMesh.control`, sends CPU tensors and bytes along it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron import device
from megatron.errors import PeerLostError
from megatron.parallel.mesh import Axis

# The stopwatch's name for sends and receives of pipeline stages.
TRANSFER = "transfer"
# Its name for all other messages.
COLLECTIVE = ""

_LOST_PEER_TEXTS = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "Connection refused",
    "Connect timeout",  # gloo connects two ranks at their first message
    "Timed out waiting",  # a rank hangs, and --distributed-timeout-minutes have passed
)


class PendingMaximum:
    """An all-reduce in flight: the maximum of the ranks' integers; collective over the axis.

    Args:
        value: this rank's integer, from 0 to 2^31 - 1.
        axis: the participating ranks; its group must support CPU tensors, as `ParallelMesh.control` does.
    """

    def __init__(self, value: int, axis: Axis) -> None:
        self._value = torch.tensor([value], dtype=torch.int32)
        self._work: dist.Work | None = None
        self._pending = None if axis.tree is None else axis.tree.start_maximum(self._value.numpy())
        if axis.size > 1 and axis.tree is None:
            self._work = dist.all_reduce(self._value, op=dist.ReduceOp.MAX, group=axis.group, async_op=True)

    def wait(self) -> int:
        """Waits for all ranks and returns the maximum."""
        if self._pending is not None:
            return int(self._pending.result()[0])
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._value)


def all_reduce_sum(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sums `tensor` over the axis, in place, and returns it."""
    if axis.tree is not None:
        return tensor.copy_(torch.from_numpy(axis.tree.total(tensor.numpy())))
    if axis.size > 1:
        with axis.timed():
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=axis.group)
    return tensor


def exchange_parts(parts: Sequence[torch.Tensor], sizes: Sequence[int], axis: Axis) -> list[torch.Tensor]:
    """Sends one tensor to every rank of the axis and returns the tensors received from each.

    Shapes: parts `[n_i]`, of one dtype; result `[sizes[i]]`.
    """
    if axis.size == 1:
        return list(parts)
    sent = torch.cat(list(parts))
    received = sent.new_empty(sum(sizes))
    with axis.timed():
        dist.all_to_all_single(received, sent, list(sizes), [len(part) for part in parts], group=axis.group)
    return list(received.split(list(sizes)))


def all_reduce_max(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Takes the element-wise maximum of `tensor` over the axis, in place, and returns it."""
    if axis.tree is not None:
        return tensor.copy_(torch.from_numpy(axis.tree.maximum(tensor.numpy())))
    if axis.size > 1:
        with axis.timed():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=axis.group)
    return tensor


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Overwrites `tensor` with the tensor of rank `source` of the axis, and returns it."""
    if axis.tree is not None:
        content = axis.tree.broadcast(_as_bytes(tensor.contiguous()), source)
        return tensor.copy_(_as_tensor(content).view(tensor.dtype).view(tensor.shape))
    if axis.size > 1:
        with axis.timed():
            dist.broadcast(tensor, src=axis.ranks[source], group=axis.group)
    return tensor


def send(tensor: torch.Tensor, axis: Axis, destination: int) -> None:
    """Sends a tensor to rank `destination` of the axis, which calls `receive`; not collective."""
    dist.send(tensor.contiguous(), dst=axis.ranks[destination], group=axis.group)


def receive(tensor: torch.Tensor, axis: Axis, source: int) -> torch.Tensor:
    """Receives into `tensor` from rank `source` of the axis, which sends the same shape and dtype; returns it."""
    dist.recv(tensor, src=axis.ranks[source], group=axis.group)
    return tensor


def wait_for(works: Iterable[dist.Work], axis: Axis, kind: str = "") -> None:
    """Waits for messages between ranks of the axis, and times only the wait.

    Asynchronous messages are awaited here, too: `watch/stacks.py` recognizes a waiting rank by this module.
    """
    with axis.timed(kind):
        for work in works:
            work.wait()


class PendingMessage:
    """A tensor in transit; its memory must not be written before `wait` has returned.

    Args:
        tensor: the tensor that is sent, or received into.
        kind: the stopwatch's name for the wait.
    """

    def __init__(self, tensor: torch.Tensor, work: dist.Work | None, stopwatch_of: Axis, kind: str = TRANSFER) -> None:
        self._tensor, self._work, self._axis, self._kind = tensor, work, stopwatch_of, kind

    @property
    def is_over(self) -> bool:
        """True after `wait`."""
        return self._work is None

    @property
    def has_arrived(self) -> bool:
        """True if `wait` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor:
        """Waits for the message (on a GPU, only work queued from now on waits) and returns its tensor."""
        if self._work is not None:
            wait_for([self._work], self._axis, self._kind)
            self._work = None
        return self._tensor


def start_all_reduce_sum(tensor: torch.Tensor, axis: Axis) -> PendingMessage:
    """Starts `all_reduce_sum`, on an axis without a tree."""
    work = None
    if axis.size > 1:
        work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=axis.group, async_op=True)
    return PendingMessage(tensor, work, axis, COLLECTIVE)


def start_reduce_scatter_sum(tensor: torch.Tensor, axis: Axis) -> PendingMessage:
    """Starts to sum this rank's part of `tensor` over the axis, in place; the other parts become undefined.

    Shapes: `[n]` with `n` a multiple of the axis's size `r`; the result, a view, `[n/r]`.
    """
    part, work = _part_of(tensor, axis), None
    if axis.size > 1:
        work = dist.reduce_scatter_tensor(part, tensor, group=axis.group, async_op=True)
    return PendingMessage(part, work, axis, COLLECTIVE)


def start_exchange(tensor: torch.Tensor, axis: Axis) -> PendingMessage:
    """Starts to receive this rank's part of `tensor` from every rank, in the order of the axis.

    Shapes: `[n]` with `n` a multiple of the axis's size `r`; the result, of `r` parts, `[n]`.
    """
    if axis.size == 1:
        return PendingMessage(tensor, None, axis, COLLECTIVE)
    received = torch.empty_like(tensor)
    work = dist.all_to_all_single(received, tensor, group=axis.group, async_op=True)
    return PendingMessage(received, work, axis, COLLECTIVE)


def start_all_gather(tensor: torch.Tensor, axis: Axis) -> PendingMessage:
    """Starts to overwrite the parts of the other ranks in `tensor`, which has this rank's part in its place.

    Shapes: `[n]` with `n` a multiple of the axis's size.
    """
    work = None
    if axis.size > 1:
        work = dist.all_gather_into_tensor(tensor, _part_of(tensor, axis), group=axis.group, async_op=True)
    return PendingMessage(tensor, work, axis, COLLECTIVE)


def _part_of(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    size = len(tensor) // axis.size
    return tensor.narrow(0, axis.rank * size, size)


def start_send(tensor: torch.Tensor, axis: Axis, destination: int) -> PendingMessage:
    """Starts to send a tensor to rank `destination` of the axis, which calls `receive` or `start_receive`.

    Two ranks that send to each other must start their messages in the same order.
    """
    whole = tensor.contiguous()
    return PendingMessage(whole, dist.isend(whole, dst=axis.ranks[destination], group=axis.group), axis)


def start_receive(tensor: torch.Tensor, axis: Axis, source: int) -> PendingMessage:
    """Starts to receive into `tensor` from rank `source` of the axis; see `start_send`."""
    return PendingMessage(tensor, dist.irecv(tensor, src=axis.ranks[source], group=axis.group), axis)


def broadcast_bytes(content: bytes, axis: Axis, source: int = 0) -> bytes:
    """Returns the bytes of rank `source` of the axis on every rank; `content` of the other ranks is ignored."""
    if axis.tree is not None:
        return axis.tree.broadcast(content, source)
    if axis.size == 1:
        return content
    message_device = _message_device(axis)
    size = broadcast(torch.tensor([len(content)], dtype=torch.int64, device=message_device), axis, source)
    if axis.rank == source:
        message = _as_tensor(content).to(message_device)
    else:
        message = torch.empty(int(size), dtype=torch.uint8, device=message_device)
    return _as_bytes(broadcast(message, axis, source)) if int(size) else b""


def gather_bytes(content: bytes, axis: Axis) -> list[bytes] | None:
    """Returns the bytes of every rank of the axis, in axis order, on its first rank, and None on the others.

    In a group every rank sends an eight-byte length and its bytes padded to the longest, because NCCL opens a
    communicator for each pair with point-to-point messages; in a tree the ranks between relay them.
    """
    if axis.tree is not None:
        return axis.tree.gather(content)
    if axis.size == 1:
        return [content]
    message_device = _message_device(axis)
    size = torch.tensor([len(content)], dtype=torch.int64, device=message_device)
    sizes = [torch.empty_like(size) for _ in range(axis.size)]
    dist.all_gather(sizes, size, group=axis.group)
    message = _as_tensor(content.ljust(max(map(int, sizes)), b"\0")).to(message_device)
    messages = [] if axis.rank else [torch.empty_like(message) for _ in sizes]
    if len(message):
        dist.gather(message, messages or None, dst=axis.ranks[0], group=axis.group)
    return None if axis.rank else [_as_bytes(each[: int(size)]) for each, size in zip(messages, sizes, strict=True)]


def broadcast_json(value: Any, axis: Axis, source: int = 0) -> Any:
    """Returns the JSON-serializable value of rank `source` of the axis on every rank; other values are ignored.

    The value is always encoded as JSON (tuples become lists), even on an axis of size 1.
    """
    content = json.dumps(value).encode() if axis.rank == source else b""
    return json.loads(broadcast_bytes(content, axis, source))


def all_gather_json(value: Any, axis: Axis) -> list[Any]:
    """Gathers a JSON-serializable value from every rank of the axis, in axis order, on every rank.

    The bytes a rank receives grow with the size of the axis; if only one rank needs them, `gather_bytes` is cheaper.
    """
    gathered = gather_bytes(json.dumps(value).encode(), axis)
    values = None if gathered is None else [json.loads(content) for content in gathered]
    return list(broadcast_json(values, axis))


def is_lost_peer(failure: BaseException) -> bool:
    """Returns True if a rank failed because another one exited or hangs, by gloo's and NCCL's error messages."""
    if isinstance(failure, PeerLostError | dist.DistBackendError | dist.DistNetworkError):
        return True
    return isinstance(failure, RuntimeError) and any(text in str(failure) for text in _LOST_PEER_TEXTS)


def _message_device(axis: Axis) -> torch.device:
    """The device whose tensors the axis's backend can send."""
    is_nccl = axis.tree is None and dist.get_backend(axis.group) == "nccl"
    return device.current_device() if is_nccl else torch.device("cpu")


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _as_bytes(message: torch.Tensor) -> bytes:
    return message.cpu().view(torch.uint8).numpy().tobytes() if message.numel() else b""
