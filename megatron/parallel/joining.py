"""Joins and leaves a run: from the launcher's variables to an open mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, final

import torch.distributed as dist

from megatron import device, log, process_exit
from megatron.config import ParallelRequest
from megatron.errors import HangError, LaunchError, PeerLostError
from megatron.parallel.launchers import Ranks
from megatron.parallel.mesh import ParallelMesh, build_mesh, requested_axes, requested_experts
from megatron.parallel.messages import is_lost_peer
from megatron.parallel.processes import ProcessIdentity, allow_open_files
from megatron.parallel.rank_start import bind_to_deepspeed_runner, bind_to_launcher, launched_ranks
from megatron.parallel.tree_opening import LOOPBACK
from megatron.slurm import SlurmJob, find_slurm_job

_LOOKUP_TRIES = 3  # one second apart
# A rank connects to the store for the join monitor, for its groups and for torch's own monitoring of them.
_CONNECTIONS_PER_RANK, _OTHER_FILES, _FEWEST_OTHER_FILES = 4, 1024, 64
# After the limit, the time left to the main thread to give up before the monitor's thread acts.
_GRACE_SECONDS = 2.0
# How long ranks that gave up wait for each other, and for a reply of the store; longer than the grace period.
_ANSWER_SECONDS = 5.0
# How long they wait for the one rank that determines which are missing.
_ACCOUNT_SECONDS = 30.0
# Shortest polling interval, and most polls of all ranks; the store serves some 65,000 a second (on two cores).
_POLL_SECONDS, _POLLS_PER_SECOND = 0.1, 8192
_KEYS_PER_REQUEST = 1024
_MOST_NAMED = 16
_FIRST, _LAST, _ANSWERED = "come", "joined", "answered"
_GAVE_UP, _TURNS, _FINDERS, _ACCOUNT, _READERS = "gave up", "turns", "finders", "account", "readers"


def open_mesh(parallel: ParallelRequest) -> ParallelMesh:
    """Joins the other ranks and returns the mesh of this one.

    Supports torchrun, the deepspeed launcher, srun, MPI, Flux, jsrun and variables set by hand; one process uses no
    network. Always sets torchrun's variables in the environment, because DeepSpeed reads them. A rank started by a
    launcher is killed when the launcher exits.

    Raises:
        LaunchError: the launcher's variables contradict each other, tp x pp does not fit the world size, there are too
            few GPUs, or rank 0 may not open a connection to every rank.
    """
    ranks = launched_ranks(parallel.local_rank)
    sizes = requested_axes(parallel, ranks.world_size)
    if ranks.has_parent_launcher:
        bind_to_launcher()
    if ranks.launcher == "deepspeed":
        bind_to_deepspeed_runner()
    local_device = device.local_device(
        ranks.local_rank, one_device_per_process=ranks.is_foreign_job or ranks.launcher == "environment"
    )
    _export(ranks)
    backend = parallel.distributed_backend or device.default_backend()
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    address = f"{ranks.master_address}:{ranks.master_port}"
    monitor = JoinMonitor(ranks.rank, ranks.world_size, address, timeout.total_seconds())
    is_joining = not dist.is_initialized()
    with monitor if is_joining and ranks.world_size > 1 else contextlib.nullcontext():
        if is_joining:
            _join(ranks, backend, timeout, monitor)
        log.set_rank(ranks.rank, ranks.world_size)
        host = LOOPBACK if ranks.is_one_node else ranks.master_address
        with _explained(ranks, backend, timeout, monitor):
            mesh = build_mesh(sizes, local_device, ranks.local_rank, timeout, host, requested_experts(parallel))
        monitor.finish()
    return mesh.configured(parallel)


def count_ranks(parallel: ParallelRequest) -> int:
    """Returns the number of processes that the launcher started, without communication.

    Raises:
        LaunchError: the launcher's variables contradict each other.
    """
    ranks = launched_ranks(parallel.local_rank)
    log.set_rank(ranks.rank, ranks.world_size)
    return ranks.world_size


def rendezvous() -> tuple[str, int]:
    """Host and port of the rendezvous of an open mesh."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def slurm_job() -> SlurmJob | None:
    """The Slurm job around this process; None outside of one.

    Raises:
        LaunchError: its variables cannot be read.
    """
    return find_slurm_job(os.environ)


def has_address(host: str) -> bool:
    """Returns True if this machine can resolve the host."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


def close_mesh(mesh: ParallelMesh) -> None:
    """Destroys the process group, if the mesh has one."""
    for axis in (mesh.control, mesh.background):
        if axis.tree is not None:
            axis.tree.close()
    if mesh.world.group is not None and dist.is_initialized():
        dist.destroy_process_group()


def _export(ranks: Ranks) -> None:
    # Otherwise each gloo group connects every rank to every other before any message is sent.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # messages available to a report on a hang
    os.environ.update(
        RANK=str(ranks.rank),
        WORLD_SIZE=str(ranks.world_size),
        LOCAL_RANK=str(ranks.local_rank),
        MASTER_ADDR=ranks.master_address,
        MASTER_PORT=str(ranks.master_port),
    )
    if ranks.is_one_node and sys.platform.startswith("linux"):
        # Otherwise gloo resolves the host's own name, which fails or is slow on many laptops and in containers.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _join(ranks: Ranks, backend: str, timeout: timedelta, monitor: JoinMonitor) -> None:
    if ranks.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    _check_address(ranks)
    with _explained(ranks, backend, timeout, monitor):
        monitor.begin(_open_store(ranks, timeout))
        store = _new_namespace(timeout)
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)


@contextlib.contextmanager
def _explained(ranks: Ranks, backend: str, timeout: timedelta, monitor: JoinMonitor) -> Iterator[None]:
    """Adds to network errors the missing ranks, or the settings of the rendezvous."""
    try:
        yield
    except (dist.DistError, RuntimeError, ValueError) as failure:
        has_timed_out = "timed out" in str(failure).lower()
        missing = monitor.missing() if monitor.is_late else None
        if missing is not None:
            raise missing from failure
        # A lost rank may have crashed while it started; any other error would recur at the next start.
        kind = PeerLostError if has_timed_out or is_lost_peer(failure) else LaunchError
        raise kind(
            f"Rank {ranks.rank} of {ranks.world_size} could not join the others at {ranks.master_address}:"
            f"{ranks.master_port} (started by {ranks.launcher}, backend {backend}, --distributed-timeout-minutes "
            f"{timeout.total_seconds() / 60:g}): {str(failure).splitlines()[0].rstrip('.')}. Check that every rank is "
            f"running and can reach that address; if the port is taken, set another MASTER_PORT."
        ) from failure


def _open_store(ranks: Ranks, timeout: timedelta) -> dist.Store:
    """Connects to the store of the run, on rank 0 or in torchrun's agent, without waiting for other ranks.

    Source: torch/distributed/rendezvous.py, `_create_c10d_store`.
    """
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    connections = _CONNECTIONS_PER_RANK * ranks.world_size
    needed = connections + _FEWEST_OTHER_FILES
    if ranks.rank == 0 and not is_agents and allow_open_files(connections + _OTHER_FILES) < needed:
        raise LaunchError(
            f"Rank 0 hosts the store of {ranks.world_size:,} ranks with {_CONNECTIONS_PER_RANK} connections each, but "
            f"may not open the {needed:,} files that this takes. Raise the hard limit of its machine (ulimit -Hn "
            f"{needed} as administrator; LimitNOFILE of the service that starts jobs), or start the ranks with "
            "torchrun, whose agent hosts the store."
        )
    store = dist.TCPStore(
        ranks.master_address,
        ranks.master_port,
        is_master=ranks.rank == 0 and not is_agents,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_agents else "0"
    mine = dist.PrefixStore(f"calls{attempt}", store)
    return dist.PrefixStore(f"call{mine.add(f'of_rank{ranks.rank}', 1)}", mine)


def _new_namespace(timeout: timedelta) -> dist.Store:
    """A new namespace of the store, which may outlive a mesh, under torchrun always: torch would find the addresses of
    the earlier mesh under the same keys.
    """
    store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return dist.PrefixStore(f"mesh{store.add(f'meshes_of_rank{rank}', 1)}", store)


def _check_address(ranks: Ranks) -> None:
    """Reports a host name that does not resolve, which torch would retry silently until the timeout.

    Raises only on nodes of a scheduler: the name of a pod or container may start to resolve later.
    """
    started = "" if ranks.launcher == "environment" else f" (started by {ranks.launcher})"
    for left in reversed(range(_LOOKUP_TRIES)):
        try:
            socket.getaddrinfo(ranks.master_address, ranks.master_port)
            return
        except (OSError, UnicodeError) as failure:
            text = (
                f"Rank {ranks.rank} of {ranks.world_size} cannot resolve {ranks.master_address!r}, the host of rank "
                f"0{started}: {getattr(failure, 'strerror', None) or failure}. Set MASTER_ADDR to a "
                "name or IP address of that host that all nodes can resolve."
            )
            if not ranks.is_foreign_job:
                log.warning(f"{text} Retrying until --distributed-timeout-minutes have passed.")
                return
            if left == 0:
                raise LaunchError(text) from failure
            time.sleep(1)


@final
class JoinMonitor:
    """Monitors which ranks have joined; a context manager around everything that connects the ranks.

    Args:
        address: host and port of the store, for messages.
        limit_seconds: how long a rank waits for the others to arrive, and again for them to connect.
        end: ends the process from the thread.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        limit_seconds: float,
        end: Callable[[int, str, int], object] | None = None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._address = address
        self._limit_seconds = limit_seconds
        self._end = end or _end
        self._poll_seconds = max(_POLL_SECONDS, size / _POLLS_PER_SECOND)
        self._store: dist.Store | None = None
        self._holder: ProcessIdentity | None = None
        self._until = time.monotonic() + limit_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._guard, name="join-monitor", daemon=True)

    def __enter__(self) -> JoinMonitor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def begin(self, store: dist.Store) -> None:
        """Waits until all ranks have arrived.

        Args:
            store: a connection that nothing else uses.

        Raises:
            HangError: some have not arrived within the limit.
        """
        self._store = store
        self._await_all(store, _FIRST)
        self._holder = _identity(store, 0)

    def finish(self) -> None:
        """Waits until all ranks are connected.

        Raises:
            HangError: some have not connected within the limit.
        """
        if self._store is not None:
            self._store.set(f"{_ANSWERED}/{self._rank}", "yes")
            self._await_all(self._store, _LAST)

    @property
    def is_late(self) -> bool:
        """True once this rank has waited for the limit; torch words time-outs in many ways."""
        return time.monotonic() >= self._until

    def missing(self) -> HangError | None:
        """After a time-out, the error that names the missing ranks; None if all ranks have joined."""
        missing = self._account()
        return None if missing is None else HangError(missing[1])

    def _await_all(self, store: dist.Store, stage: str) -> None:
        self._until = time.monotonic() + self._limit_seconds
        store.set(f"{stage}/{self._rank}", json.dumps(dataclasses.asdict(ProcessIdentity.own())))
        if store.add(stage, 1) == self._size:
            store.set(f"{stage}/all", "yes")
        while not store.check([f"{stage}/all"]):
            if self.is_late or store.check([_GAVE_UP]):
                failure = self.missing()
                if failure is not None:
                    raise failure
                if time.monotonic() > self._until + self._limit_seconds:  # a rank replied, and has exited since
                    raise HangError(self._unknown())
            time.sleep(self._poll_seconds)
        if store.check([_GAVE_UP]):
            store.set(f"{_ANSWERED}/{self._rank}", "yes")  # for ranks that gave up just before the last one arrived
        self._until = time.monotonic() + self._limit_seconds

    def _guard(self) -> None:
        while (left := self._until + _GRACE_SECONDS - time.monotonic()) > 0:
            if self._over.wait(left):
                return
        missing = self._account()
        if missing is not None and not self._over.is_set():
            self._end(HangError.exit_code, missing[1], missing[0])

    def _account(self) -> tuple[int, str] | None:
        """The first missing rank and a message about all of them; None if none is missing."""
        if self._store is None:
            return 0, self._sentence([0], {})
        answers: list[dict[str, Any]] = []
        has_answered = threading.Event()

        def request(store: dist.Store) -> None:
            with contextlib.suppress(RuntimeError):  # the rank that hosted the store has exited
                store.set(f"{_ANSWERED}/{self._rank}", "yes")
                has_answered.set()
                answers.append(self._published(store))
            has_answered.set()

        thread = threading.Thread(target=request, args=(self._store,), daemon=True)
        thread.start()
        if has_answered.wait(_ANSWER_SECONDS + 1.0):
            thread.join(_ACCOUNT_SECONDS)
        if answers:
            absent: list[int] = answers[0]["ranks"]
            known = {int(rank): ProcessIdentity(**entry) for rank, entry in answers[0]["came"].items()}
        elif self._holder is not None and self._holder.is_stopped():
            absent, known = [0], {0: self._holder}
        else:
            return (self._rank, self._unknown()) if thread.is_alive() else None
        for process in known.values():
            process.kill()  # it is stopped, and without a launcher no one else would end it
        return (absent[0], self._sentence(absent, known)) if absent else None

    def _sentence(self, absent: Sequence[int], known: Mapping[int, ProcessIdentity]) -> str:
        shown = [f"{rank}" + (f" ({known[rank]})" if rank in known else "") for rank in absent[:_MOST_NAMED]]
        shown += [f"{len(absent) - _MOST_NAMED:,} more"] if len(absent) > _MOST_NAMED else []
        return (
            f"rank {', '.join(shown)} {'has' if len(absent) == 1 else 'have'} not joined the other ranks of "
            f"{self._size} at {self._address} within {self._limit_seconds:g} s (--distributed-timeout-minutes): "
            "stopped, crashed or unreachable. See the log of that rank and its machine, then run the command again."
        )

    def _unknown(self) -> str:
        return (
            f"rank {self._rank} waited {self._limit_seconds:g} s (--distributed-timeout-minutes) for the other ranks "
            f"of {self._size}; the missing ranks are unknown, because the store at {self._address} does not reply. "
            "See the log of rank 0 and its machine, then run the same command again."
        )

    def _published(self, store: dist.Store) -> dict[str, Any]:
        """The missing ranks, in order, and the known processes of these; the first rank to call determines them."""
        store.set(_GAVE_UP, "yes")
        turn = store.add(_TURNS, 0)
        if store.add(f"{_FINDERS}/{turn}", 1) == 1:
            absent, known = self._absent(store)
            entries = {rank: dataclasses.asdict(process) for rank, process in known.items()}
            if not absent:  # the last rank has arrived by now: ranks that give up later check again
                store.delete_key(_GAVE_UP)
                store.add(_TURNS, 1)
            store.set(f"{_ACCOUNT}/{turn}", json.dumps({"ranks": absent, "came": entries}))
        while not store.check([f"{_ACCOUNT}/{turn}"]):
            time.sleep(self._poll_seconds)
        account: dict[str, Any] = json.loads(store.get(f"{_ACCOUNT}/{turn}"))
        self._let_others_read(store, turn, self._size - len(account["ranks"]) if account["ranks"] else 0)
        return account

    def _let_others_read(self, store: dist.Store, turn: int, count: int) -> None:
        """Keeps rank 0, which may host the store, running until `count` ranks have read the missing ranks."""
        readers, until = store.add(f"{_READERS}/{turn}", 1), time.monotonic() + _ANSWER_SECONDS + self._poll_seconds
        while self._rank == 0 and readers < count and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            readers = store.add(f"{_READERS}/{turn}", 0)

    def _absent(self, store: dist.Store) -> tuple[list[int], dict[int, ProcessIdentity]]:
        """The ranks that have not arrived; if all have, those that neither connected nor gave up, with their processes.

        A rank that arrives a moment too late is not among them: it runs.
        """
        everyone = range(self._size)
        late = _lacking(store, _FIRST, everyone)
        until = time.monotonic() + _ANSWER_SECONDS + self._poll_seconds
        while not late and time.monotonic() < until and not _have_all(store, _ANSWERED, everyone):
            time.sleep(self._poll_seconds)
        if late:
            return late, {}
        silent = _lacking(store, _ANSWERED, everyone)
        return silent, {rank: process for rank in silent[:_MOST_NAMED] if (process := _identity(store, rank))}


def _have_all(store: dist.Store, key: str, ranks: range) -> bool:
    starts = range(0, len(ranks), _KEYS_PER_REQUEST)
    return all(store.check([f"{key}/{rank}" for rank in ranks[at : at + _KEYS_PER_REQUEST]]) for at in starts)


def _lacking(store: dist.Store, key: str, ranks: range) -> list[int]:
    """The ranks that have not set a key, by bisection."""
    if not ranks or (len(ranks) <= _KEYS_PER_REQUEST and _have_all(store, key, ranks)):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return [*_lacking(store, key, ranks[:middle]), *_lacking(store, key, ranks[middle:])]


def _identity(store: dist.Store, rank: int) -> ProcessIdentity | None:
    """The process of a rank, if it has arrived."""
    if not store.check([f"{_FIRST}/{rank}"]):
        return None
    return ProcessIdentity(**json.loads(store.get(f"{_FIRST}/{rank}")))


def _end(code: int, text: str, rank: int) -> None:
    process_exit.record_failure(code, text)
    log.error(text, rank=rank)
    process_exit.end_process(code, text, is_shown=True)
