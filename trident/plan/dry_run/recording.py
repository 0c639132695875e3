"""Records the messages of one rank of a world that does not exist, in place of sending them.

The rank's code runs as it is, on tensors that have shapes and no values.
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
# The names of collectives, by torch's operation.
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
    """A collective, or one end of a message between two ranks.

    Attributes:
        kind: such as all-reduce, send or receive.
        ranks: the global ranks of its group; of a message between two, this rank and the other.
        elements: of the largest tensor that this rank gives or takes.
        dtype: of them.
        operation: how values are combined, or which rank of the group they come from or go to.
        sent, taken: rows that go to and come from each rank of an all-to-all.
    """

    kind: str
    ranks: tuple[int, ...]
    elements: int
    dtype: str
    operation: str = ""
    sent: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()

    @property
    def is_collective(self) -> bool:
        return self.kind not in (SEND, RECEIVE)

    @property
    def size(self) -> str:
        """Elements, their type, and how they are combined if not by a sum."""
        combined = f" ({self.operation})" if self.operation not in ("", "sum") else ""
        return f"{self.elements:,} {self.dtype}{combined}"

    def __str__(self) -> str:
        if not self.is_collective:
            end = "to" if self.kind == SEND else "from"
            return f"{self.kind} of {self.size} {end} rank {self.ranks[1]}"
        return f"{self.kind} of {self.size} over ranks {shown_ranks(self.ranks)}"


def shown_ranks(ranks: Sequence[int]) -> str:
    """A group in a few words: all of few ranks, or the first, the next and the last."""
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]} ({len(ranks)})"


class RecordedMessages(TorchDispatchMode):
    """Takes the messages of this rank off it, in their order; a context manager.

    Attributes:
        rank: this rank.
        results: of operations so far, as `_described` says, None for a change in place; ranks can share them.
        messages: so far.
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
        if func is torch.ops.aten.nonzero.default:  # what is in no memory is taken to be nowhere zero
            return given[0].new_empty(given[0].numel(), given[0].dim(), dtype=torch.int64)
        if func is torch.ops.aten._local_scalar_dense.default:  # and every value that the host asks for is zero
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
        sent: tuple[int, ...] = ()
        taken: tuple[int, ...] = ()
        if kind == "all-to-all":
            sent, taken = _rows(given[1], given[4:5], len(ranks)), _rows(given[0], given[3:4], len(ranks))
        operation = _operation(name, func, given)
        self.messages.append(RankMessage(kind, ranks, math.prod(largest.shape), dtype, operation, sent, taken))
        work = Work.boxed(FakeWork())
        if name in ("send", "recv_", "barrier", "reduce_", "gather_", "alltoall_base_"):
            return work
        return given[0], work

    def _result(self, func: Any, given: Any, named: Any) -> Any:
        """Runs an operation, or makes what it gave for tensors like these: torch takes up to 1 ms to find a shape."""
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
    """All that the results of an operation depend on; None if that includes values of a tensor."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype) if value.is_meta else None
    if isinstance(value, list | tuple):
        parts = tuple(_described(each) for each in value)
        return None if None in parts else parts
    return type(value), value


def _made(described: Any) -> Any:
    """The opposite of `_described`."""
    if isinstance(described[0], torch.Size):
        return torch.empty_strided(described[0], described[1], dtype=described[2], device="meta")
    return described[1] if isinstance(described[0], type) else tuple(_made(each) for each in described)


class RecordedTree:
    """Takes the messages off a rank that would go along a `RankTree`; other ranks have nothing to say.

    Args:
        recorded: where they are noted.
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
        """What this rank gives, or null in JSON."""
        self._note("broadcast", 0, "bytes", f"root {source}")
        return content or b"null"

    def gather(self, content: bytes) -> list[bytes] | None:
        """What this rank gives, and null in JSON of the others."""
        self._note("gather", 0, "bytes", "root 0")
        return None if self._recorded.rank else [content, *[b"null"] * (len(self.ranks) - 1)]


def _operation(name: str, func: Any, given: Any) -> str:
    """How a collective combines values, and the place of the one rank of the group that gives or gets them."""
    named = {each.name: value for each, value in zip(func._schema.arguments, given, strict=False)}
    words = [dist.ReduceOp.RedOpType(named["reduce_op"].op()).name.lower()] if "reduce_op" in named else []
    return " ".join([*words, f"root {named['root_rank']}"] if "root_rank" in named else words)


def _rows(tensor: Any, splits: Any, ranks: int) -> tuple[int, ...]:
    """Rows of an all-to-all for each rank: of a list of tensors, or of a tensor that is divided as given or evenly."""
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
    """Makes this process a rank of a world of which nothing else exists."""
    devices = dist.Backend.backend_capability["fake"]
    if "meta" not in devices:  # or batches of sends would find no backend for tensors without memory
        devices.append("meta")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
