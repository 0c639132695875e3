"""Counts the bytes that this rank passes to torch.distributed and to the tree of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.rank_tree import RankTree


@dataclass
class MessageSizes:
    """What one rank sent and received: a tensor of an all-reduce or broadcast counts once, as sent.

    `calls` holds the name and the bytes of each call in order.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    calls: list[tuple[str, int]] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """Both directions."""
        return self.sent_bytes + self.received_bytes


_RECEIVED = ("recv",)
_SENT = ("all_reduce", "broadcast", "send", "reduce")
_OF_TREE = ("total", "maximum", "start_maximum", "broadcast", "gather")
_LISTS = ("gather", "all_gather")
_UNCOUNTED = (
    "all_gather_into_tensor",
    "all_to_all",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "isend",
    "irecv",
)


@contextlib.contextmanager
def count_messages() -> Iterator[MessageSizes]:
    """Counts until the end of the block; a call of a kind that is not counted is an error."""
    sizes = MessageSizes()

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any, *more: Any, **named: Any) -> Any:
            sent, received = _bytes_of(name, tensor, more)
            sizes.sent_bytes += sent
            sizes.received_bytes += received
            sizes.calls.append((name, sent + received))
            return function(tensor, *more, **named)

        return call

    def wrap_tree(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tree: RankTree, content: Any, *more: Any) -> Any:
            result = function(tree, content, *more)
            told = (
                len(result) if name == "broadcast" else len(content) if isinstance(content, bytes) else content.nbytes
            )
            gathered = sum(map(len, result)) if name == "gather" and result is not None else 0
            sizes.sent_bytes += 0 if gathered else told
            sizes.received_bytes += gathered
            sizes.calls.append((name, gathered or told))
            return result

        return call

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective that is not counted")

    with pytest.MonkeyPatch.context() as patch:
        for name in (*_SENT, *_RECEIVED, *_LISTS):
            patch.setattr(dist, name, wrap(name, getattr(dist, name)))
        for name in _UNCOUNTED:
            patch.setattr(dist, name, refuse)
        for name in _OF_TREE:
            patch.setattr(RankTree, name, wrap_tree(name, getattr(RankTree, name)))
        yield sizes


def _bytes_of(name: str, tensor: Any, more: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes sent and received by one call on this rank."""
    if name in _RECEIVED:
        return 0, _size(tensor)
    if name == "gather":
        return _size(tensor), sum(map(_size, more[0] if more and more[0] else []))
    if name == "all_gather":
        return _size(more[0]), sum(map(_size, tensor))
    return _size(tensor), 0


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
