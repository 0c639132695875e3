"""Sequences that wait for a place in the engine, in an order that is fair to small requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Gives one sequence of each waiting request in turn, so that a request for many does not hold up the others.

    Requests take turns in the order in which they arrived, and the sequences of one keep their order.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Item]] = {}
        self._turns: deque[str] = deque()

    def __len__(self) -> int:
        return sum(len(items) for items in self._waiting.values())

    def add(self, request: str, items: Iterable[Item]) -> None:
        """Lets the sequences of a request wait."""
        found = deque(items)
        if found:
            self._waiting[request] = found
            self._turns.append(request)

    def take(self) -> tuple[str, Item]:
        """Removes the sequence whose turn it is, and says whose it is; the queue must not be empty."""
        request = self._turns.popleft()
        items = self._waiting[request]
        item = items.popleft()
        if items:
            self._turns.append(request)
        else:
            del self._waiting[request]
        return request, item

    def remove(self, request: str, is_gone: Callable[[Item], bool]) -> None:
        """Removes those of the waiting sequences of a request for which `is_gone` is true."""
        waiting = self._waiting.get(request)
        if waiting is None:
            return
        kept = deque(item for item in waiting if not is_gone(item))
        if kept:
            self._waiting[request] = kept
        else:
            del self._waiting[request]
            self._turns.remove(request)
