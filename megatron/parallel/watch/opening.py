"""Connects the ranks of a run for the watch: two of them have a hub, and all others connect to both; in a run of many
ranks, to one of their node that passes on what they send.

Addresses, ports and the secret that a rank must know go over `mesh.control`. Ranks of one machine meet on its loopback
interface; others on the address at which a rank is reached from another machine.
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
class HubAddress:
    """Where a hub listens, and the secret with which a rank shows that it belongs to the run."""

    rank: int
    address: str
    port: int
    token: str


@dataclass(frozen=True)
class Meeting:
    """The result of connecting the ranks, on one of them.

    Attributes:
        processes: of all ranks.
        hubs: the rank of each hub, the first one first.
        token: of the run.
        listener: the socket of the hub on this rank, or of what it passes on.
        connected: a socket to each hub on another rank, or to the rank that passes on what this one sends.
        fallback: the hubs, if there is such a rank, for when it is gone.
    """

    processes: tuple[ProcessIdentity, ...]
    hubs: tuple[int, ...]
    token: str = ""
    listener: socket.socket | None = None
    connected: tuple[tuple[HubAddress, socket.socket], ...] = ()
    fallback: tuple[HubAddress, ...] = ()

    def close(self) -> None:
        for opened in (self.listener, *(connection for _, connection in self.connected)):
            if opened is not None:
                opened.close()


def meet(mesh: ParallelMesh, rendezvous: tuple[str, int]) -> Meeting | None:
    """Connects all ranks; collective over the mesh. None, with a warning, if some rank cannot be reached.

    Args:
        rendezvous: host and port at which the ranks met.
    """
    own = dataclasses.replace(ProcessIdentity.own(), place=mesh.place)
    if mesh.world.size == 1:
        return Meeting((own,), (0,))
    introduction = [*dataclasses.asdict(own).values(), network_namespace(), address_towards(*rendezvous)]
    everyone = all_gather_json(introduction, mesh.control)
    processes = tuple(ProcessIdentity(*entry[:6]) for entry in everyone)
    networks = [(process.machine, entry[6]) for process, entry in zip(processes, everyone, strict=True)]
    second = next((rank for rank, network in enumerate(networks) if network != networks[0]), None)
    rank = mesh.world.rank
    if rank == 0 and second is not None:
        address = address_towards(everyone[second][7], 9)
    else:
        address = LOOPBACK if second is None else everyone[rank][7]
    hubs = (0, second or 1)
    parents = parents_of(networks, hubs)
    token: str = broadcast_json(secrets.token_hex(16), mesh.control)
    listener, problem = None, ""
    if rank in hubs or rank in parents:
        listener, problem = _listen(address, mesh.world.size)
    port = 0 if listener is None else listener.getsockname()[1]
    places = all_gather_json([address, port], mesh.control)
    parent = parents[rank]
    targets = hubs if parent is None else (parent,)
    connected = []
    for target in targets:
        if target != rank and not problem:
            hub = HubAddress(target, places[target][0], places[target][1], token)
            opened, problem = _connect(hub)
            connected += [] if opened is None else [(hub, opened)]
    others = (
        ()
        if parent is None
        else tuple(HubAddress(hub, places[hub][0], places[hub][1], token) for hub in hubs if hub != parent)
    )
    meeting = Meeting(processes, hubs, token, listener, tuple(connected), others)
    return meeting if _is_complete(mesh, meeting, problem) else None


def _is_complete(mesh: ParallelMesh, meeting: Meeting, problem: str) -> bool:
    """Whether all ranks are connected; if not, one of them says why, and no socket stays open."""
    problems: Sequence[str] = all_gather_json(problem, mesh.control)
    failed = next((rank for rank, text in enumerate(problems) if text), None)
    if failed is None:
        return True
    meeting.close()
    if mesh.world.rank == 0:
        log.warning(
            f"rank {failed} {problems[failed]}, so nobody notices a rank that hangs before a collective times out "
            "(--distributed-timeout-minutes). Ranks must reach each other on ports that the system chooses."
        )
    return False


def _listen(address: str, size: int) -> tuple[socket.socket | None, str]:
    """A socket that listens on a port that is free, or what is wrong."""
    try:
        allow_open_files(size + _OTHER_FILES)
        listener = socket.create_server((address, 0), family=address_family(address), backlog=size)
    except OSError as failure:
        return None, f"cannot listen on {address} ({failure})"
    listener.setblocking(False)
    return listener, ""


def _connect(hub: HubAddress) -> tuple[socket.socket | None, str]:
    """A socket that is connected to a hub, or what is wrong; a hub that does not listen says so itself."""
    if not hub.port:
        return None, ""
    try:
        return socket.create_connection((hub.address, hub.port), timeout=_CONNECT_SECONDS), ""
    except OSError as failure:
        return None, f"cannot reach rank {hub.rank} at {hub.address}:{hub.port} ({failure})"
