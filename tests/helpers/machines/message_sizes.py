"""Counts the bytes of tensors that this rank passes to torch.distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist


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


_RECEIVED = ("recv", "scatter")
_SENT = ("all_reduce", "broadcast", "send", "reduce")
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

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective that is not counted")

    with pytest.MonkeyPatch.context() as patch:
        for name in (*_SENT, *_RECEIVED, *_LISTS):
            patch.setattr(dist, name, wrap(name, getattr(dist, name)))
        for name in _UNCOUNTED:
            patch.setattr(dist, name, refuse)
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
