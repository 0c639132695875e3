"""A rank's connection to a hub on another rank."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from megatron.parallel.watch.hub_state import Failure
from megatron.parallel.watch.opening import HubAddress
from megatron.parallel.watch.position import Heartbeat
from megatron.parallel.watch.verdict import RunEnd
from megatron.parallel.watch.wire import Connection, MessageFields

_FOR_ALL = ("ping", "report", "life", "end")


class Link:
    """What a rank knows of a hub, and what it tells it.

    Attributes:
        rank: this one.
        hub: the hub's rank, or that of the rank which passes on what this one sends.
        heard_at: when the last message from the hub arrived.
        has_left: the hub's rank ended as planned.
        end: the verdict that the hub sent.
    """

    def __init__(self, connection: Connection, hub: int, now: float, rank: int | None = None) -> None:
        self.rank = rank
        self.connection = connection
        self.hub = hub
        self.heard_at = now
        self.lost_at: float | None = None
        self.has_left = False
        self.end: RunEnd | None = None
        self.wants_heartbeat = False
        self.wants_report = False
        self._questions: list[Callable[[int], None]] = []

    @classmethod
    def open(cls, connected: socket.socket, hub: HubAddress, rank: int, now: float, *, is_alone: bool = False) -> Link:
        """Says on a connection to a hub which rank this is, and that it belongs to the run.

        Args:
            is_alone: the rank at the other end is to pass on to the hubs what this one sends.
        """
        link = cls(Connection(connected), hub.rank, now, rank)
        link.send("hello", token=hub.token, rank=rank, **({"alone": True} if is_alone else {}))
        return link

    @property
    def is_open(self) -> bool:
        return self.lost_at is None and not self.has_left

    def send(self, kind: str, **values: Any) -> None:
        self.connection.send({"kind": kind, **values})

    def tell(self, heartbeat: Heartbeat) -> None:
        """Tells the hub where this rank is."""
        self.wants_heartbeat = False
        self.send("beat", **heartbeat.values())

    def tell_report(self, heartbeat: Heartbeat, waits: bool, stacks: str) -> None:
        """Sends the hub the stacks of this rank."""
        self.wants_report = False
        self.send("report", **heartbeat.values(), waits=waits, stacks=stacks)

    def tell_failure(self, failure: Failure) -> None:
        self.send("failure", code=failure.code, text=failure.text, ready=failure.is_ready)

    def ask_for_life(self, answer: Callable[[int], None]) -> None:
        """Asks for a sign of life of all ranks; `answer` is given the number of those that gave none."""
        self._questions.append(answer)
        self.send("ask")

    def hear(self, now: float, size: int) -> list[MessageFields]:
        """Reads what has arrived from the hub of a run of `size` ranks; returns what other ranks must know as well."""
        heard: list[MessageFields] = []
        for message in self.connection.receive():
            self.heard_at = now
            try:
                kind = message.kind
                if kind == "ping":
                    self.wants_heartbeat = True
                elif kind == "report":
                    self.wants_report = True
                elif kind == "life" and (not message.has("to") or message.whole("to", size - 1) == self.rank):
                    for answer in self._questions:
                        answer(message.whole("silent", size))
                    self._questions = []
                elif kind == "bye":
                    self.has_left = True
                elif kind == "end" and self.end is None:
                    self.end = RunEnd(
                        message.whole("code", 255),
                        message.whole("rank", size - 1),
                        message.text("text"),
                        tuple(message.wholes("silent", size - 1, 1024)),
                    )
                if kind in _FOR_ALL:
                    heard.append(message)
            except ValueError:
                self.connection.is_lost = True
        if self.connection.is_lost and self.lost_at is None:
            self.lost_at = now
            self.connection.close()
        return heard
