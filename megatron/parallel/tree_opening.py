"""Connects the ranks to trees; each reads its parent's address and the token of the run from the run's store."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron.parallel.rank_tree import RankTree, children_of, parent_of

LOOPBACK = "127.0.0.1"
_HELLO = struct.Struct("!32sIB")  # the token, the child's rank and the number of the tree
_HELLO_SECONDS = 10.0


def open_trees(
    store: dist.Store, rank: int, size: int, host: str, limits: Sequence[timedelta], join: timedelta
) -> list[RankTree]:
    """Opens one tree for each limit; collective over all ranks.

    Args:
        store: of the run, with a namespace used only by this call.
        host: a name of the host of rank 0 that all ranks can reach; the loopback address for a run on one host.
        limits: timeouts of calls, one for each tree.
        join: timeout of this call.

    Raises:
        DistNetworkError: a rank does not connect, or cannot be reached.
    """
    below = children_of(rank, size)
    until = time.monotonic() + join.total_seconds()
    with contextlib.ExitStack() as stack:
        listener = None
        if rank == 0:
            store.set("token", secrets.token_hex(16))
        if below:
            address = LOOPBACK if host == LOOPBACK else address_towards(host, 9)
            # Other hosts connect to rank 0's host by name. The host itself often resolves that name to a loopback
            # address, so its ranks listen on all interfaces.
            is_named = host != LOOPBACK and (rank == 0 or ipaddress.ip_address(address).is_loopback)
            connections = len(below) * len(limits)
            listener = stack.enter_context(_listen("" if is_named else address, connections))
            store.set(f"address{rank}", f"{host if is_named else address} {listener.getsockname()[1]}")
        token = store.get("token")
        parents = [None if rank == 0 else _connect(store, rank, token, number, until) for number in range(len(limits))]
        children = _accept(
            listener, token, {(child, number) for child in below for number in range(len(limits))}, until
        )
    return [
        RankTree(
            rank,
            size,
            parents[number],
            {child: connection for (child, of_tree), connection in children.items() if of_tree == number},
            limit.total_seconds(),
        )
        for number, limit in enumerate(limits)
    ]


def address_towards(host: str, port: int) -> str:
    """The address of the interface through which this machine reaches a host; loopback if it cannot."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def address_family(address: str) -> socket.AddressFamily:
    """The family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listen(address: str, backlog: int) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server((address, 0), family=address_family(address), backlog=backlog)


def _connect(store: dist.Store, rank: int, token: bytes, number: int, until: float) -> socket.socket:
    parent = parent_of(rank)
    host, _, port = store.get(f"address{parent}").decode().rpartition(" ")
    try:
        connection = socket.create_connection((host, int(port)), timeout=max(0.1, until - time.monotonic()))
        connection.sendall(_HELLO.pack(token, rank, number))
    except OSError as failure:
        raise dist.DistNetworkError(f"rank {parent} cannot be reached at {host}:{port}: {failure}") from failure
    return connection


def _accept(
    listener: socket.socket | None, token: bytes, expected: set[tuple[int, int]], until: float
) -> dict[tuple[int, int], socket.socket]:
    """The connections of the children in each tree; connections without the token are closed."""
    accepted: dict[tuple[int, int], socket.socket] = {}
    while listener is not None and len(accepted) < len(expected):
        listener.settimeout(max(0.1, until - time.monotonic()))
        try:
            connection = listener.accept()[0]
        except TimeoutError as failure:
            missing = sorted({rank for rank, _ in expected - accepted.keys()})
            raise dist.DistNetworkError(f"timed out waiting for ranks {missing} to connect") from failure
        connection.settimeout(_HELLO_SECONDS)
        with contextlib.suppress(OSError):
            content = connection.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(content) == _HELLO.size:
                shown, rank, number = _HELLO.unpack(content)
                if hmac.compare_digest(shown, token) and (rank, number) in expected - accepted.keys():
                    accepted[rank, number] = connection
                    continue
        connection.close()
    return accepted
