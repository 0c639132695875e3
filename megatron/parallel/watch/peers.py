"""The ranks that report to this one, directly or through another rank: authentication and routing.

In a run of many ranks, some ranks relay messages between others and the coordinators, so that no rank has many
connections; see `parents_of`.
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
LOST = MessageFields({"kind": "lost"})  # stands for the end of a rank's connection


class Peers:
    """The listening side of a coordinator, or of a rank that relays messages.

    Args:
        token: authenticates a rank.
        size: number of ranks.
        rank: this rank.
    """

    def __init__(self, token: str, size: int, rank: int) -> None:
        self._token = token
        self._rank = rank
        self._size = size
        self._unknown: dict[Connection, float] = {}
        self._ranks: dict[Connection, int] = {}
        self._routes: dict[int, Connection] = {}
        self._below: set[Connection] = set()

    def accept(self, connection: Connection, now: float) -> bool:
        """Adds a connection, whose first message must have the token; False if too many have not sent it yet."""
        if len(self._unknown) >= _MOST_UNKNOWN + self._size:
            connection.close()
            return False
        connection.limit_bytes = HELLO_BYTES
        self._unknown[connection] = now + _HELLO_SECONDS
        return True

    def close_unknown(self, now: float) -> None:
        """Closes connections that have not authenticated in time."""
        for connection, until in list(self._unknown.items()):
            if now > until:
                del self._unknown[connection]
                connection.close()

    def receive(self, connection: Connection) -> list[tuple[int, MessageFields]]:
        """Returns the messages that have arrived, each with its rank; an invalid message closes the connection."""
        received: list[tuple[int, MessageFields]] = []
        for message in connection.receive():
            try:
                if connection in self._unknown:
                    received.append((self._authenticate(connection, message), message))
                elif connection in self._ranks:
                    rank = message.whole("from", self._size - 1) if message.has("from") else self._ranks[connection]
                    if message.kind == "hello":
                        self._routes.setdefault(rank, connection)
                    if self._routes.get(rank) is connection:  # else the rank has reconnected by another route
                        received.append((rank, message))
            except ValueError:
                connection.is_lost = True
        return received

    def receive_all(self, connection: Connection) -> list[tuple[int, MessageFields]]:
        """As `receive`, for a rank that only relays messages: the end of a connection is one of them."""
        received = self.receive(connection)
        if connection.is_lost:
            rank = self.remove(connection)
            received += [] if rank is None else [(rank, LOST)]
        return received

    def remove(self, connection: Connection) -> int | None:
        """Removes a lost connection; returns the rank at its other end, if that was the rank's route."""
        self._unknown.pop(connection, None)
        self._below.discard(connection)
        rank = self._ranks.pop(connection, None)
        gone = [number for number, route in self._routes.items() if route is connection]
        for number in gone:
            del self._routes[number]
        connection.close()
        return rank if rank in gone else None

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to all ranks that are connected to this one."""
        for connection in self._ranks:
            connection.send(message)

    def relay_down(self, message: MessageFields, rank: int | None = None) -> None:
        """Relays a coordinator's message to the ranks below this one, or to one of them."""
        for connection in self._below:
            if rank is None or self._routes.get(rank) is connection:
                connection.send(message.values())

    def is_relayed(self, connection: Connection) -> bool:
        """True if messages that arrive there must be relayed to the coordinators."""
        return connection in self._below

    def _authenticate(self, connection: Connection, message: MessageFields) -> int:
        if message.kind != "hello" or not hmac.compare_digest(message.text("token", 64), self._token):
            raise ValueError("the token is wrong")
        rank = message.whole("rank", self._size - 1)
        if rank == self._rank or rank in self._ranks.values():
            raise ValueError("the rank is already connected")
        del self._unknown[connection]
        connection.limit_bytes = MESSAGE_BYTES
        self._ranks[connection], self._routes[rank] = rank, connection
        if message.has("alone"):
            self._below.add(connection)
        return rank


def relayed_message(rank: int, message: MessageFields) -> dict[str, Any]:
    """A rank's message as another one relays it, without the fields that only authenticate."""
    kept = {name: value for name, value in message.values().items() if name not in ("token", "alone", "rank")}
    return {**kept, "from": rank}


def parents_of(nodes: Sequence[Hashable], coordinators: Sequence[int], near: int = NEAR) -> list[int | None]:
    """The rank that relays the messages of each rank; None for ranks that report to the coordinators directly.

    In a run of more than `near` ranks, the lowest of each `near` ranks of a node relays the messages of the others, the
    lowest of each `near` such ranks relays theirs, and so on.

    Args:
        nodes: a key of the node of each rank.
    """
    parents: list[int | None] = [None] * len(nodes)
    of_node: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        of_node.setdefault(node, []).append(rank)
    groups = [ranks[at : at + near] for ranks in of_node.values() for at in range(0, len(ranks), near)]
    while len(nodes) > near:
        for head, *others in groups:
            for rank in others:
                parents[rank] = head
        heads = [group[0] for group in groups]
        if len(heads) <= near:
            break
        groups = [heads[at : at + near] for at in range(0, len(heads), near)]
    for coordinator in coordinators:
        parents[coordinator] = None
    return parents
