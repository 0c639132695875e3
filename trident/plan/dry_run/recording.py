"""Records the messages of one rank of a fake world instead of sending them.

The code of the rank runs unchanged, on meta tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, Work
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

SEND, RECEIVE = "send", "receive"
_PEER_TO_PEER = {"send": SEND, "recv_": RECEIVE}
# Names of collectives by torch operation.
_KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "broadcast_": "broadcast",
    "barrier": "barrier",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_": "reduce",
}


@dataclass(frozen=True)
class RankMessage:
    """A collective, a send or a receive.

    Attributes:
        kind: such as all-reduce, send or receive.
        ranks: the global ranks of its group; for sends and receives, this rank and its peer.
        elements: of the largest tensor of this rank.
        dtype: of the elements.
        operation: the reduction, and the root.
        sent, received: rows sent to and received from each rank in an all-to-all.
    """

    kind: str
    ranks: tuple[int, ...]
    elements: int
    dtype: str
    operation: str = ""
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    @property
    def is_collective(self) -> bool:
        return self.kind not in (SEND, RECEIVE)

    @property
    def size(self) -> str:
        """Elements, dtype, and operation unless it is a sum."""
        operation = f" ({self.operation})" if self.operation not in ("", "sum") else ""
        return f"{self.elements:,} {self.dtype}{operation}"

    def __str__(self) -> str:
        if not self.is_collective:
            direction = "to" if self.kind == SEND else "from"
            return f"{self.kind} of {self.size} {direction} rank {self.ranks[1]}"
        return f"{self.kind} of {self.size} over ranks {ranks_text(self.ranks)}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Formats a group: all of up to four ranks, otherwise the first two and the last."""
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]} ({len(ranks)})"


class RecordedMessages(TorchDispatchMode):
    """Context manager that records the messages of this rank in order.

    Attributes:
        rank: this rank.
        results: cached results of operations, see `_described`; None for in-place operations. Ranks can share them.
        messages: recorded messages.
    """

    def __init__(self, rank: int, results: dict[Any, Any]) -> None:
        super().__init__()
        self.rank, self.results = rank, results
        self.messages: list[RankMessage] = []

    def take(self) -> tuple[RankMessage, ...]:
        taken, self.messages = tuple(self.messages), []
        return taken

    def __torch_dispatch__(self, func: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        """Records an operation of torch.distributed, or runs any other."""
        namespace, _, name = func.name().partition("::")
        if func is torch.ops.aten.nonzero.default:  # meta tensors count as nonzero everywhere
            return given[0].new_empty(given[0].numel(), given[0].dim(), dtype=torch.int64)
        if func is torch.ops.aten._local_scalar_dense.default:  # values read by the host are zero
            return torch.zeros((), dtype=given[0].dtype, device="cpu").item()
        if namespace != "c10d":
            return self._result(func, given, named or {})
        name = name.partition(".")[0]
        group = next(argument for argument in given if isinstance(argument, torch.ScriptObject))
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
        tensors = list(_tensors(given))
        largest = max(tensors, key=lambda tensor: tensor.numel(), default=torch.empty(0))
        if name in _PEER_TO_PEER:
            other = ranks[next(argument for argument in given if isinstance(argument, int))]
            ranks = (self.rank, other)
        kind = _PEER_TO_PEER.get(name) or _KINDS[name]
        dtype = str(largest.dtype).removeprefix("torch.")
        is_exchange = kind == "all-to-all"
        sent = _rows(given[1], given[4:5], len(ranks)) if is_exchange else ()
        received = _rows(given[0], given[3:4], len(ranks)) if is_exchange else ()
        operation = _operation(name, func, given)
        self.messages.append(RankMessage(kind, ranks, math.prod(largest.shape), dtype, operation, sent, received))
        work = Work.boxed(FakeWork())
        if name in ("send", "recv_", "barrier", "reduce_", "gather_", "alltoall_base_"):
            return work
        return given[0], work

    def _result(self, func: Any, given: Any, named: Any) -> Any:
        """Runs an operation, or rebuilds its cached result: torch takes up to 1 ms to infer a shape."""
        key = None if func.is_view else _described((func, given, list(named.items())))
        if key in self.results:
            result = self.results[key]
            return given[0] if result is None else _made(result)
        result = func(*given, **named)
        if key is not None and isinstance(result, torch.Tensor | tuple):
            if not func._schema.is_mutable and (described := _described(result)) is not None:
                self.results[key] = described
            elif result is given[0] and key == _described((func, given, list(named.items()))):
                self.results[key] = None
        return result


def _described(value: Any) -> Any:
    """The cache key of arguments, or the description of a result; None if it depends on values of a tensor."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype) if value.is_meta else None
    if isinstance(value, list | tuple):
        parts = tuple(_described(each) for each in value)
        return None if None in parts else parts
    return type(value), value


def _made(described: Any) -> Any:
    if isinstance(described[0], torch.Size):
        return torch.empty_strided(described[0], described[1], dtype=described[2], device="meta")
    return described[1] if isinstance(described[0], type) else tuple(_made(each) for each in described)


class RecordedTree:
    """Records the messages of a `RankTree`; the other ranks contribute null.

    Args:
        recorded: receives the messages.
        ranks: all ranks.
    """

    def __init__(self, recorded: RecordedMessages, ranks: tuple[int, ...]) -> None:
        self._recorded, self.ranks = recorded, ranks

    def _note(self, kind: str, elements: int, dtype: str, operation: str = "") -> None:
        self._recorded.messages.append(RankMessage(kind, self.ranks, elements, dtype, operation))

    def _reduced(self, operation: str, values: np.ndarray) -> np.ndarray:
        self._note("all-reduce", values.size, str(values.dtype), operation)
        return values

    maximum, total = partialmethod(_reduced, "max"), partialmethod(_reduced, "sum")

    def broadcast(self, content: bytes, source: int = 0) -> bytes:
        """Returns the content of this rank, or null in JSON."""
        self._note("broadcast", 0, "bytes", f"root {source}")
        return content or b"null"

    def gather(self, content: bytes) -> list[bytes] | None:
        """Returns the content of this rank, and null in JSON for the others."""
        self._note("gather", 0, "bytes", "root 0")
        return None if self._recorded.rank else [content, *[b"null"] * (len(self.ranks) - 1)]


def _operation(name: str, func: Any, given: Any) -> str:
    """The reduction of a collective, and the root in its group."""
    named = {each.name: value for each, value in zip(func._schema.arguments, given, strict=False)}
    parts = [dist.ReduceOp.RedOpType(named["reduce_op"].op()).name.lower()] if "reduce_op" in named else []
    return " ".join([*parts, f"root {named['root_rank']}"] if "root_rank" in named else parts)


def _rows(tensor: Any, splits: Any, ranks: int) -> tuple[int, ...]:
    """Rows of an all-to-all per rank, for a list of tensors or a tensor with explicit or even splits."""
    if isinstance(tensor, list):
        return tuple(len(each) for each in tensor)
    return tuple(splits[0]) if splits and splits[0] else (len(tensor) // ranks,) * ranks


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Makes this process a rank of a world without other ranks."""
    devices = dist.Backend.backend_capability["fake"]
    if "meta" not in devices:  # required by batched sends of meta tensors
        devices.append("meta")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
