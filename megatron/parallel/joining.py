"""Joining and leaving a run: from the launcher's variables to an open mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import final

import torch.distributed as dist

from megatron import device, log
from megatron.config import ParallelRequest
from megatron.errors import HangError, LaunchError, PeerLostError
from megatron.launch.slurm import SlurmJob, find_slurm_job
from megatron.parallel.launchers import Ranks
from megatron.parallel.mesh import ParallelMesh, build_mesh, requested_axes, requested_experts
from megatron.parallel.messages import is_lost_peer
from megatron.parallel.processes import ProcessIdentity
from megatron.parallel.rank_start import die_with_deepspeed_runner, die_with_launcher, launched_ranks
from megatron.parallel.tree_opening import LOOPBACK

_LOOKUP_TRIES = 3  # one second apart
# How long after the limit a thread waits for the main thread to give up.
_GRACE_SECONDS = 2.0
# How long the ranks that gave up wait for each other, and for a store that may not answer; longer than that.
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_FIRST, _LAST, _GAVE_UP = "come", "joined", "gave up"


def open_mesh(parallel: ParallelRequest) -> ParallelMesh:
    """Joins the other ranks and returns this one's place among them.

    Works under torchrun, the deepspeed launcher, srun and mpirun, with variables set by hand, and without any of them
    (one process, which uses no network). Sets torchrun's variables in the environment however the process was started,
    because DeepSpeed reads them. A rank started by a launcher is killed when the launcher ends.

    Raises:
        LaunchError: the launcher's variables contradict each other, tp x pp does not fit the world, or there are not
        enough GPUs.
    """
    ranks = launched_ranks(parallel.local_rank)
    sizes = requested_axes(parallel, ranks.world_size)
    if ranks.has_parent_launcher:
        die_with_launcher()
    if ranks.launcher == "deepspeed":
        die_with_deepspeed_runner()
    own_device = device.local_device(
        ranks.local_rank, one_device_per_process=ranks.launcher in ("srun", "mpirun", "environment")
    )
    _export(ranks)
    backend = parallel.distributed_backend or device.default_backend()
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    address = f"{ranks.master_address}:{ranks.master_port}"
    calling = RollCall(ranks.rank, ranks.world_size, address, timeout.total_seconds())
    is_joining = not dist.is_initialized()
    with calling if is_joining and ranks.world_size > 1 else contextlib.nullcontext():
        if is_joining:
            _join(ranks, backend, timeout, calling)
        log.set_rank(ranks.rank, ranks.world_size)
        host = LOOPBACK if ranks.is_one_node else ranks.master_address
        with _explained(ranks, backend, timeout, calling):
            mesh = build_mesh(sizes, own_device, ranks.local_rank, timeout, host, requested_experts(parallel))
        calling.finish()
    return dataclasses.replace(mesh, splits_sequence=parallel.splits_sequence)


def count_ranks(parallel: ParallelRequest) -> int:
    """How many processes the launcher started; needs no contact with them.

    Raises:
        LaunchError: the launcher's variables contradict each other.
    """
    ranks = launched_ranks(parallel.local_rank)
    log.set_rank(ranks.rank, ranks.world_size)
    return ranks.world_size


def rendezvous() -> tuple[str, int]:
    """Host and port at which the ranks of an open mesh met."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def slurm_job() -> SlurmJob | None:
    """The Slurm job around this process; None outside of one.

    Raises:
        LaunchError: its variables cannot be read.
    """
    return find_slurm_job(os.environ)


def has_address(host: str) -> bool:
    """Whether this machine can look the host up."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


def close_mesh(mesh: ParallelMesh) -> None:
    """Leaves the process group; does nothing for a mesh that has none."""
    for axis in (mesh.control, mesh.background):
        if axis.tree is not None:
            axis.tree.close()
    if mesh.world.group is not None and dist.is_initialized():
        dist.destroy_process_group()


def _export(ranks: Ranks) -> None:
    # Otherwise each gloo group connects every rank to every other before any message is sent.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # messages that a report on a hang can show
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


def _join(ranks: Ranks, backend: str, timeout: timedelta, calling: RollCall) -> None:
    if ranks.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if ranks.launcher in ("srun", "mpirun"):
        _check_address(ranks)
    with _explained(ranks, backend, timeout, calling):
        calling.begin(_open_store(ranks, timeout))
        store = _own_keys(timeout)
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)


@contextlib.contextmanager
def _explained(ranks: Ranks, backend: str, timeout: timedelta, calling: RollCall) -> Iterator[None]:
    """Says of errors of the network who is missing, or what the ranks were doing."""
    try:
        yield
    except (dist.DistError, RuntimeError, ValueError) as failure:
        has_timed_out = "timed out" in str(failure).lower()
        missing = calling.missing() if calling.is_late else None
        if missing is not None:
            raise missing from failure
        # A rank that is lost may have died while it started; anything else is wrong again at the next start.
        kind = PeerLostError if has_timed_out or is_lost_peer(failure) else LaunchError
        raise kind(
            f"Rank {ranks.rank} of {ranks.world_size} could not join the others at {ranks.master_address}:"
            f"{ranks.master_port} (started by {ranks.launcher}, backend {backend}, --distributed-timeout-minutes "
            f"{timeout.total_seconds() / 60:g}): {str(failure).splitlines()[0].rstrip('.')}. Check that every rank is "
            f"running and can reach that address; if the port is taken, set another MASTER_PORT."
        ) from failure


def _open_store(ranks: Ranks, timeout: timedelta) -> dist.Store:
    """A connection to the store of the run, which rank 0 or torchrun holds, that waits for no other rank.

    Source: torch/distributed/rendezvous.py, `_create_c10d_store`.
    """
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
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


def _own_keys(timeout: timedelta) -> dist.Store:
    """The store at the common address, with keys that an earlier mesh of the same processes has not used.

    The store may outlive a mesh, under torchrun always. Its entries say where the ranks listened, and torch gives them
    the same names again: a second mesh would wait for connections to addresses that are gone.
    """
    store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return dist.PrefixStore(f"mesh{store.add(f'meshes_of_rank{rank}', 1)}", store)


def _check_address(ranks: Ranks) -> None:
    """Refuses a host name that does not resolve; every rank would retry it until its timeout.

    Only for names from a node list: the name of a pod or container may start to resolve later.
    """
    for left in reversed(range(_LOOKUP_TRIES)):
        try:
            socket.getaddrinfo(ranks.master_address, ranks.master_port)
            return
        except socket.gaierror as failure:
            if left == 0:
                raise LaunchError(
                    f"Rank {ranks.rank} of {ranks.world_size} cannot look up {ranks.master_address!r}, the host of "
                    f"rank 0 (started by {ranks.launcher}): {failure.strerror}. Set MASTER_ADDR to a name or IP "
                    f"address of that host that all nodes can resolve."
                ) from failure
            time.sleep(1)


@final
class RollCall:
    """Says who is there; a context manager, around everything that connects the ranks.

    Args:
        address: host and port of the store, for messages.
        limit_seconds: how long a rank waits for the others, at the start and again from when all have come.
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
        self._store: dist.Store | None = None
        self._holder: ProcessIdentity | None = None
        self._until = time.monotonic() + limit_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._guard, name="roll-call", daemon=True)

    def __enter__(self) -> RollCall:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def begin(self, store: dist.Store) -> None:
        """Waits until all ranks have come.

        Args:
            store: a connection for this alone.

        Raises:
            HangError: some have not within the limit.
        """
        self._store = store
        self._meet(store, _FIRST)
        self._holder = _identity(store, 0)

    def finish(self) -> None:
        """Waits until all ranks are connected.

        Raises:
            HangError: some are not within the limit.
        """
        if self._store is not None:
            self._meet(self._store, _LAST)

    @property
    def is_late(self) -> bool:
        """Whether this rank has waited for as long as it may, however torch words that."""
        return time.monotonic() >= self._until

    def missing(self) -> HangError | None:
        """Why this rank waits in vain, after a time-out; None if all ranks are there."""
        missing = self._account()
        return None if missing is None else HangError(missing[1])

    def _meet(self, store: dist.Store, stage: str) -> None:
        self._until = time.monotonic() + self._limit_seconds
        store.set(f"{stage}/{self._rank}", json.dumps(dataclasses.asdict(ProcessIdentity.own())))
        if store.add(stage, 1) == self._size:
            store.set(f"{stage}/all", "yes")
        while not store.check([f"{stage}/all"]):
            if self.is_late or store.check([f"{_GAVE_UP}/any"]):
                failure = self.missing()
                if failure is not None:
                    raise failure
            time.sleep(_LOOK_SECONDS)
        self._until = time.monotonic() + self._limit_seconds

    def _guard(self) -> None:
        while (left := self._until + _GRACE_SECONDS - time.monotonic()) > 0:
            if self._over.wait(left):
                return
        missing = self._account()
        if missing is not None and not self._over.is_set():
            self._end(HangError.exit_code, missing[1], missing[0])

    def _account(self) -> tuple[int, str] | None:
        """The first rank that is missing and a sentence about all of them; None if there is none."""
        answers: list[dict[int, ProcessIdentity | None]] = []

        def ask() -> None:
            try:
                answers.append({0: None} if self._store is None else self._absent(self._store))
            except RuntimeError:  # the rank that held the store has ended
                answers.append({})

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_ANSWER_SECONDS + 1.0)
        absent = answers[0] if answers else {0: self._holder}
        if not absent:
            return None
        for process in absent.values():
            if process is not None:
                process.kill()  # nobody else would, if no launcher does: it does not run
        named = ", ".join(f"{rank}" + (f" ({process})" if process else "") for rank, process in absent.items())
        what = "has" if len(absent) == 1 else "have"
        return min(absent), (
            f"rank {named} {what} not joined the other ranks of {self._size} at {self._address} within "
            f"{self._limit_seconds:g} s (--distributed-timeout-minutes): stopped, dead or cut off. See the log of that "
            "rank and its machine, then run the same command again."
        )

    def _absent(self, store: dist.Store) -> dict[int, ProcessIdentity | None]:
        """The ranks that have not come; if all have, those that neither are connected nor gave up as this one did."""
        store.set(f"{_GAVE_UP}/{self._rank}", "yes")
        store.set(f"{_GAVE_UP}/any", "yes")
        others = [rank for rank in range(self._size) if rank != self._rank]
        late = [rank for rank in others if not store.check([f"{_FIRST}/{rank}"])]
        silent, until = [rank for rank in others if rank not in late], time.monotonic() + _ANSWER_SECONDS
        while silent and time.monotonic() < until:  # also so that this rank does not end before they have asked
            time.sleep(_LOOK_SECONDS)
            silent = [rank for rank in silent if not any(store.check([f"{note}/{rank}"]) for note in (_GAVE_UP, _LAST))]
        return {rank: _identity(store, rank) for rank in late or silent}


def _identity(store: dist.Store, rank: int) -> ProcessIdentity | None:
    """The process of a rank, if it has come."""
    if not store.check([f"{_FIRST}/{rank}"]):
        return None
    return ProcessIdentity(**json.loads(store.get(f"{_FIRST}/{rank}")))


def _end(code: int, text: str, rank: int) -> None:
    log.record_failure(code, text)
    log.error(text, rank=rank)
    log.end_process(code, text, is_shown=True)
