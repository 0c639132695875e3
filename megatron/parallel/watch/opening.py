"""Connects the ranks of a run for the watch: two of them listen, and all others connect to both.

Addresses, ports and the secret that a rank must know go over `mesh.control`. Ranks of one machine meet on its loopback
interface; others on the address at which a rank is reached from another machine.
"""

from __future__ import annotations

import resource
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megatron import log
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_gather_json, broadcast_json
from megatron.parallel.processes import ProcessIdentity, network_namespace

_LOOPBACK = "127.0.0.1"
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
        token: of the hub on this rank, if there is one.
        listener: the socket of that hub.
        connected: a socket to each hub on another rank.
    """

    processes: tuple[ProcessIdentity, ...]
    hubs: tuple[int, ...]
    token: str = ""
    listener: socket.socket | None = None
    connected: tuple[tuple[HubAddress, socket.socket], ...] = ()

    def close(self) -> None:
        """Closes all sockets."""
        for opened in (self.listener, *(connection for _, connection in self.connected)):
            if opened is not None:
                opened.close()


def meet(mesh: ParallelMesh, rendezvous: tuple[str, int]) -> Meeting | None:
    """Connects all ranks; collective over the mesh. None, with a warning, if some rank cannot be reached.

    Args:
        rendezvous: host and port at which the ranks met.
    """
    own = ProcessIdentity.own()
    if mesh.world.size == 1:
        return Meeting((own,), (0,))
    introduction = [*asdict(own).values(), network_namespace(), _address_towards(*rendezvous)]
    everyone = all_gather_json(introduction, mesh.control)
    processes = tuple(ProcessIdentity(*entry[:5]) for entry in everyone)
    networks = [(process.machine, entry[5]) for process, entry in zip(processes, everyone, strict=True)]
    second = next((rank for rank, network in enumerate(networks) if network != networks[0]), None)
    rank = mesh.world.rank
    if rank == 0 and second is not None:
        address = _address_towards(everyone[second][6], 9)
    else:
        address = _LOOPBACK if second is None else everyone[rank][6]
    hubs = (0, second or 1)
    listener, token, problem = None, secrets.token_hex(16), ""
    if rank in hubs:
        listener, problem = _listen(address, mesh.world.size)
    port = 0 if listener is None else listener.getsockname()[1]
    addresses = [HubAddress(*broadcast_json([rank, address, port, token], mesh.control, source=hub)) for hub in hubs]
    connected = []
    for hub in addresses:
        if hub.rank != rank and not problem:
            opened, problem = _connect(hub)
            connected += [] if opened is None else [(hub, opened)]
    meeting = Meeting(processes, hubs, token, listener, tuple(connected))
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
        _allow_files(size + _OTHER_FILES)
        listener = socket.create_server((address, 0), family=_family(address), backlog=size)
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


def _address_towards(host: str, port: int) -> str:
    """The address of this machine's interface from which packets go to a host; loopback if there is no way to it."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return _LOOPBACK


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _allow_files(count: int) -> None:
    """Raises the limit on open files, where that is allowed: a hub has a connection for each rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
