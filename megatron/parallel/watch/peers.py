"""The ranks that are connected to this one, or to a rank that is: who has shown that it belongs to the run, and where
each can be reached.

A hub has these for the ranks that report to it. In a run of many ranks, some ranks pass on what others send, up to the
hubs and down from them, so that no rank has many connections; see `parents_of`.
"""

from __future__ import annotations

import hmac
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from megatron.parallel.watch.wire import MESSAGE_BYTES, Connection, MessageFields

HELLO_BYTES = 256
NEAR = 8  # ranks that report to one rank
_HELLO_SECONDS = 10.0
_MOST_UNKNOWN = 64
LOST = MessageFields({"kind": "lost"})  # of a rank whose connection has ended


class Peers:
    """The listening side of a hub, or of a rank that passes messages on.

    Args:
        token: what a rank must know.
        size: ranks of the run.
        own: this rank.
    """

    def __init__(self, token: str, size: int, own: int) -> None:
        self._token = token
        self._own = own
        self._size = size
        self._unknown: dict[Connection, float] = {}
        self._ranks: dict[Connection, int] = {}
        self._routes: dict[int, Connection] = {}
        self._below: set[Connection] = set()

    def admit(self, connection: Connection, now: float) -> bool:
        """Takes a new connection, whose first message must be the token; False if too many have not sent it yet."""
        if len(self._unknown) >= _MOST_UNKNOWN + self._size:
            connection.close()
            return False
        connection.limit_bytes = HELLO_BYTES
        self._unknown[connection] = now + _HELLO_SECONDS
        return True

    def close_unknown(self, now: float) -> None:
        """Closes connections that have not shown in time that they belong to the run."""
        for connection, until in list(self._unknown.items()):
            if now > until:
                del self._unknown[connection]
                connection.close()

    def hear(self, connection: Connection) -> list[tuple[int, MessageFields]]:
        """What has arrived, and the rank that each message is from; a message that no rank can send is a loss."""
        heard: list[tuple[int, MessageFields]] = []
        for message in connection.receive():
            try:
                if connection in self._unknown:
                    heard.append((self._greet(connection, message), message))
                elif connection in self._ranks:
                    rank = message.whole("from", self._size - 1) if message.has("from") else self._ranks[connection]
                    if message.kind == "hello":
                        self._routes.setdefault(rank, connection)
                    if self._routes.get(rank) is connection:  # not of a rank that has come by another way since
                        heard.append((rank, message))
            except ValueError:
                connection.is_lost = True
        return heard

    def hear_all(self, connection: Connection) -> list[tuple[int, MessageFields]]:
        """As `hear`, for a rank that only passes messages on: the end of a connection is one of them."""
        heard = self.hear(connection)
        if connection.is_lost:
            rank = self.drop(connection)
            heard += [] if rank is None else [(rank, LOST)]
        return heard

    def drop(self, connection: Connection) -> int | None:
        """Forgets a connection that is lost; returns the rank at its other end, if it was reached that way."""
        self._unknown.pop(connection, None)
        self._below.discard(connection)
        rank = self._ranks.pop(connection, None)
        gone = [number for number, route in self._routes.items() if route is connection]
        for number in gone:
            del self._routes[number]
        connection.close()
        return rank if rank in gone else None

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to all that are connected to this rank."""
        for connection in self._ranks:
            connection.send(message)

    def pass_down(self, message: MessageFields, rank: int | None = None) -> None:
        """Passes a hub's message on to the ranks that hear from no hub, or to one of them."""
        for connection in self._below:
            if rank is None or self._routes.get(rank) is connection:
                connection.send(message.values())

    def passes_on(self, connection: Connection) -> bool:
        """Whether what arrives there is to be passed on to the hubs on other ranks."""
        return connection in self._below

    def _greet(self, connection: Connection, message: MessageFields) -> int:
        if message.kind != "hello" or not hmac.compare_digest(message.text("token", 64), self._token):
            raise ValueError("the token is wrong")
        rank = message.whole("rank", self._size - 1)
        if rank == self._own or rank in self._ranks.values():
            raise ValueError("a rank that is connected already")
        del self._unknown[connection]
        connection.limit_bytes = MESSAGE_BYTES
        self._ranks[connection], self._routes[rank] = rank, connection
        if message.has("alone"):
            self._below.add(connection)
        return rank


def passed_on(rank: int, message: MessageFields) -> dict[str, Any]:
    """A message of a rank, as another one passes it on; without what only the first connection needs."""
    kept = {name: value for name, value in message.values().items() if name not in ("token", "alone", "rank")}
    return {**kept, "from": rank}


def parents_of(places: Sequence[Hashable], hubs: Sequence[int], near: int = NEAR) -> list[int | None]:
    """For each rank, the one that it reports to instead of the hubs; None for those that report to the hubs.

    In a run of more than `near` ranks, the lowest of each `near` ranks of a node passes on what the others send, the
    lowest of each `near` such ranks what those send, and so on.

    Args:
        places: of each rank, what those on its node have in common.
    """
    parents: list[int | None] = [None] * len(places)
    of_node: dict[Hashable, list[int]] = {}
    for rank, place in enumerate(places):
        of_node.setdefault(place, []).append(rank)
    groups = [ranks[at : at + near] for ranks in of_node.values() for at in range(0, len(ranks), near)]
    while len(places) > near:
        for head, *others in groups:
            for rank in others:
                parents[rank] = head
        heads = [group[0] for group in groups]
        if len(heads) <= near:
            break
        groups = [heads[at : at + near] for at in range(0, len(heads), near)]
    for hub in hubs:
        parents[hub] = None
    return parents
