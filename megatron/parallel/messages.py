"""What ranks tell each other outside the network: barriers, sums, flags and JSON; no gradients, no pickle.

Every function is collective over the axis it is given, and does nothing but return its own value on an axis of size 1.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from megatron import device
from megatron.parallel.mesh import Axis

_LOST_PEER_TEXTS = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "Connection refused")


def barrier(axis: Axis) -> None:
    """Returns when every rank of the axis has called it."""
    if axis.size > 1:
        dist.all_reduce(torch.zeros(1, device=_wire_device(axis)), group=axis.group)
        device.synchronize()


def all_reduce_sum(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sums `tensor` over the axis, in place, and returns it."""
    if axis.size > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=axis.group)
    return tensor


def all_reduce_max(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Takes the element-wise maximum of `tensor` over the axis, in place, and returns it."""
    if axis.size > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=axis.group)
    return tensor


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Overwrites `tensor` with that of position `source` on the axis, and returns it."""
    if axis.size > 1:
        dist.broadcast(tensor, src=axis.ranks[source], group=axis.group)
    return tensor


def any_true(flag: bool, axis: Axis) -> bool:
    """Whether the flag is set on at least one rank of the axis."""
    if axis.size == 1:
        return bool(flag)
    word = torch.tensor([int(bool(flag))], dtype=torch.int32, device=_wire_device(axis))
    return bool(all_reduce_max(word, axis).item())


def all_true(flag: bool, axis: Axis) -> bool:
    """Whether the flag is set on every rank of the axis."""
    return not any_true(not flag, axis)


def gather_json(value: Any, axis: Axis) -> list[Any]:
    """Collects a JSON-able value from every rank of the axis; every rank gets all of them, in axis order."""
    if axis.size == 1:
        return [_through_json(value)]
    wire = _wire_device(axis)
    own = _encode(value).to(wire)
    sizes = [torch.zeros(1, dtype=torch.int64, device=wire) for _ in range(axis.size)]
    dist.all_gather(sizes, torch.tensor([own.numel()], dtype=torch.int64, device=wire), group=axis.group)
    lengths = [int(size.item()) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=wire)
    padded[: own.numel()] = own
    texts = [torch.empty_like(padded) for _ in range(axis.size)]
    dist.all_gather(texts, padded, group=axis.group)
    return [_decode(text[:length]) for text, length in zip(texts, lengths, strict=True)]


def broadcast_json(value: Any, axis: Axis, source: int = 0) -> Any:
    """Returns position `source`'s JSON-able value on every rank of the axis; the others' values are ignored."""
    if axis.size == 1:
        return _through_json(value)
    wire = _wire_device(axis)
    text = _encode(value if axis.rank == source else None).to(wire)
    size = broadcast(torch.tensor([text.numel()], dtype=torch.int64, device=wire), axis, source)
    if axis.rank != source:
        text = torch.empty(int(size.item()), dtype=torch.uint8, device=wire)
    return _decode(broadcast(text, axis, source))


def is_lost_peer(failure: BaseException) -> bool:
    """Whether a collective failed because another rank ended, going by what gloo and NCCL say then."""
    if isinstance(failure, dist.DistBackendError | dist.DistNetworkError):
        return True
    return isinstance(failure, RuntimeError) and any(text in str(failure) for text in _LOST_PEER_TEXTS)


def _wire_device(axis: Axis) -> torch.device:
    """Where a tensor must be for the axis's backend to carry it."""
    return device.current_device() if dist.get_backend(axis.group) == "nccl" else torch.device("cpu")


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: torch.Tensor) -> Any:
    return json.loads(bytes(text.cpu().numpy()))


def _through_json(value: Any) -> Any:
    """What a value becomes on the wire (tuples turn into lists), so that one rank sees what several would."""
    return json.loads(json.dumps(value))
