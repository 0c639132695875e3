"""Connects the ranks of a run for monitoring.

Two ranks run a coordinator, and all others connect to both; in a run of many ranks, to a rank of their node that relays
their messages. Addresses, ports and the token that authenticates a rank are exchanged over `mesh.control`. Ranks of one
machine use its loopback interface, others its address on the network.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from megatron import log
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_gather_json, broadcast_json
from megatron.parallel.processes import ProcessIdentity, allow_open_files, network_namespace
from megatron.parallel.tree_opening import LOOPBACK, address_family, address_towards
from megatron.parallel.watch.peers import parents_of

_CONNECT_SECONDS = 20.0
_OTHER_FILES = 1024


@dataclass(frozen=True)
class CoordinatorAddress:
    """The address of a coordinator, and the token that authenticates a rank of the run."""

    rank: int
    address: str
    port: int
    token: str


@dataclass(frozen=True)
class ConnectedRanks:
    """The connections of one rank.

    Attributes:
        processes: the processes of all ranks.
        coordinators: the rank of each coordinator, the first one first.
        token: authenticates a rank of the run.
        listener: the socket that accepts other ranks' connections, if this one has a coordinator or relays messages.
        connected: a socket to each coordinator on another rank, or to the rank that relays this one's messages.
        fallback: the coordinators, for when that relaying rank is lost; empty without one.
    """

    processes: tuple[ProcessIdentity, ...]
    coordinators: tuple[int, ...]
    token: str = ""
    listener: socket.socket | None = None
    connected: tuple[tuple[CoordinatorAddress, socket.socket], ...] = ()
    fallback: tuple[CoordinatorAddress, ...] = ()

    def close(self) -> None:
        for opened in (self.listener, *(connection for _, connection in self.connected)):
            if opened is not None:
                opened.close()


def connect_ranks(mesh: ParallelMesh, rendezvous: tuple[str, int]) -> ConnectedRanks | None:
    """Connects all ranks; collective over the mesh. Returns None, after a warning, if a rank cannot be reached.

    Args:
        rendezvous: host and port of the rendezvous of the ranks.
    """
    process = dataclasses.replace(ProcessIdentity.own(), place=mesh.place)
    if mesh.world.size == 1:
        return ConnectedRanks((process,), (0,))
    entry = [*dataclasses.asdict(process).values(), network_namespace(), address_towards(*rendezvous)]
    entries = all_gather_json(entry, mesh.control)
    processes = tuple(ProcessIdentity(*entry[:6]) for entry in entries)
    networks = [(process.machine, entry[6]) for process, entry in zip(processes, entries, strict=True)]
    second = next((rank for rank, network in enumerate(networks) if network != networks[0]), None)
    rank = mesh.world.rank
    if rank == 0 and second is not None:
        address = address_towards(entries[second][7], 9)
    else:
        address = LOOPBACK if second is None else entries[rank][7]
    coordinators = (0, second or 1)
    parents = parents_of(networks, coordinators)
    token: str = broadcast_json(secrets.token_hex(16), mesh.control)
    listener, problem = None, ""
    if rank in coordinators or rank in parents:
        listener, problem = _listen(address, mesh.world.size)
    port = 0 if listener is None else listener.getsockname()[1]
    endpoints: list[tuple[str, int]] = all_gather_json([address, port], mesh.control)
    addresses = [CoordinatorAddress(number, *endpoint, token) for number, endpoint in enumerate(endpoints)]
    parent = parents[rank]
    connected = []
    for target in coordinators if parent is None else (parent,):
        if target != rank and not problem:
            opened, problem = _connect(addresses[target])
            connected += [] if opened is None else [(addresses[target], opened)]
    fallback = () if parent is None else tuple(addresses[target] for target in coordinators if target != parent)
    ranks = ConnectedRanks(processes, coordinators, token, listener, tuple(connected), fallback)
    return ranks if _is_complete(mesh, ranks, problem) else None


def _is_complete(mesh: ParallelMesh, ranks: ConnectedRanks, problem: str) -> bool:
    """Returns True if all ranks are connected; otherwise closes all sockets, and rank 0 warns."""
    problems: Sequence[str] = all_gather_json(problem, mesh.control)
    failed = next((rank for rank, text in enumerate(problems) if text), None)
    if failed is None:
        return True
    ranks.close()
    if mesh.world.rank == 0:
        log.warning(
            f"rank {failed} {problems[failed]}, so a rank that hangs is detected only when a collective times out "
            "(--distributed-timeout-minutes). Ranks must reach each other on ports that the system chooses."
        )
    return False


def _listen(address: str, size: int) -> tuple[socket.socket | None, str]:
    """Returns a socket that listens on a free port, or the problem."""
    try:
        allow_open_files(size + _OTHER_FILES)
        listener = socket.create_server((address, 0), family=address_family(address), backlog=size)
    except OSError as failure:
        return None, f"cannot listen on {address} ({failure})"
    listener.setblocking(False)
    return listener, ""


def _connect(target: CoordinatorAddress) -> tuple[socket.socket | None, str]:
    """Returns a socket that is connected to a coordinator, or the problem; nothing if its rank reports the problem."""
    if not target.port:
        return None, ""
    try:
        return socket.create_connection((target.address, target.port), timeout=_CONNECT_SECONDS), ""
    except OSError as failure:
        return None, f"cannot reach rank {target.rank} at {target.address}:{target.port} ({failure})"
