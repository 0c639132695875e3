"""A rank's connection to a coordinator on another rank."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from megatron.parallel.watch.coordinator import Failure
from megatron.parallel.watch.opening import CoordinatorAddress
from megatron.parallel.watch.position import Heartbeat
from megatron.parallel.watch.verdict import RunEnd
from megatron.parallel.watch.wire import Connection, MessageFields

_FOR_ALL = ("ping", "report", "life", "end")


class Link:
    """A rank's connection to a coordinator, or to the rank that relays its messages.

    Attributes:
        rank: this rank.
        coordinator: the rank at the other end.
        received_at: when the last message arrived.
        has_left: the other rank announced a regular exit.
        end: the verdict that the coordinator sent.
    """

    def __init__(self, connection: Connection, coordinator: int, now: float, rank: int | None = None) -> None:
        self.rank = rank
        self.connection = connection
        self.coordinator = coordinator
        self.received_at = now
        self.lost_at: float | None = None
        self.has_left = False
        self.end: RunEnd | None = None
        self.heartbeat_requested = False
        self.report_requested = False
        self._requests: list[Callable[[int], None]] = []

    @classmethod
    def open(
        cls, connected: socket.socket, address: CoordinatorAddress, rank: int, now: float, *, is_relayed: bool = False
    ) -> Link:
        """Authenticates this rank on a connection to a coordinator.

        Args:
            is_relayed: the rank at the other end relays the messages of this one to the coordinators.
        """
        link = cls(Connection(connected), address.rank, now, rank)
        link.send("hello", token=address.token, rank=rank, **({"alone": True} if is_relayed else {}))
        return link

    @property
    def is_open(self) -> bool:
        return self.lost_at is None and not self.has_left

    def send(self, kind: str, **values: Any) -> None:
        self.connection.send({"kind": kind, **values})

    def send_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Sends this rank's position."""
        self.heartbeat_requested = False
        self.send("beat", **heartbeat.values())

    def send_report(self, heartbeat: Heartbeat, waits: bool, stacks: str) -> None:
        """Sends this rank's position and stacks."""
        self.report_requested = False
        self.send("report", **heartbeat.values(), waits=waits, stacks=stacks)

    def send_failure(self, failure: Failure) -> None:
        self.send("failure", code=failure.code, text=failure.text, ready=failure.is_ready)

    def ping_all(self, answer: Callable[[int], None]) -> None:
        """Has the coordinator ping all ranks; `answer` is called with the number of ranks that did not reply."""
        self._requests.append(answer)
        self.send("ask")

    def receive(self, now: float, size: int) -> list[MessageFields]:
        """Reads the messages that have arrived in a run of `size` ranks; returns those to relay to other ranks."""
        received: list[MessageFields] = []
        for message in self.connection.receive():
            self.received_at = now
            try:
                kind = message.kind
                if kind == "ping":
                    self.heartbeat_requested = True
                elif kind == "report":
                    self.report_requested = True
                elif kind == "life" and (not message.has("to") or message.whole("to", size - 1) == self.rank):
                    for answer in self._requests:
                        answer(message.whole("silent", size))
                    self._requests = []
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
                    received.append(message)
            except ValueError:
                self.connection.is_lost = True
        if self.connection.is_lost and self.lost_at is None:
            self.lost_at = now
            self.connection.close()
        return received
