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
from megatron.parallel.rank_start import die_with_deepspeed_runner, die_with_launcher, launched_ranks
from megatron.parallel.tree_opening import LOOPBACK
from megatron.slurm import SlurmJob, find_slurm_job

_LOOKUP_TRIES = 3  # one second apart
# A rank connects to the store for the roll call, for its groups and for torch's own watch of them.
_CONNECTIONS_OF_A_RANK, _OTHER_FILES, _FEWEST_OTHER_FILES = 4, 1024, 64
# How long after the limit a thread waits for the main thread to give up.
_GRACE_SECONDS = 2.0
# How long the ranks that gave up wait for each other, and for a store that may not answer; longer than that.
_ANSWER_SECONDS = 5.0
# How long they wait for the one of them that finds out who is missing.
_ACCOUNT_SECONDS = 30.0
# How often a rank asks the store, which answers some 65,000 questions a second (measured on two cores) of all ranks.
_LOOK_SECONDS, _LOOKS_OF_ALL_RANKS = 0.1, 8192
_KEYS_OF_A_QUESTION = 1024
_MOST_NAMED = 16
_FIRST, _LAST, _ANSWERED = "come", "joined", "answered"
_GAVE_UP, _TURNS, _FINDERS, _ACCOUNT, _READERS = "gave up", "turns", "finders", "account", "readers"


def open_mesh(parallel: ParallelRequest) -> ParallelMesh:
    """Joins the other ranks and returns this one's place among them.

    Works under torchrun, the deepspeed launcher, srun, MPI, Flux and jsrun, with variables set by hand, and without any
    of them (one process, which uses no network). Sets torchrun's variables in the environment however the process was
    started, because DeepSpeed reads them. A rank started by a launcher is killed when the launcher ends.

    Raises:
        LaunchError: the launcher's variables contradict each other, tp x pp does not fit the world, there are not
        enough GPUs, or rank 0 may not have a connection with every rank.
    """
    ranks = launched_ranks(parallel.local_rank)
    sizes = requested_axes(parallel, ranks.world_size)
    if ranks.has_parent_launcher:
        die_with_launcher()
    if ranks.launcher == "deepspeed":
        die_with_deepspeed_runner()
    own_device = device.local_device(
        ranks.local_rank, one_device_per_process=ranks.is_foreign_job or ranks.launcher == "environment"
    )
    _export(ranks)
    backend = parallel.distributed_backend or device.default_backend()
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    address = f"{ranks.master_address}:{ranks.master_port}"
    calling = JoinMonitor(ranks.rank, ranks.world_size, address, timeout.total_seconds())
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


def _join(ranks: Ranks, backend: str, timeout: timedelta, calling: JoinMonitor) -> None:
    if ranks.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    _check_address(ranks)
    with _explained(ranks, backend, timeout, calling):
        calling.begin(_open_store(ranks, timeout))
        store = _own_keys(timeout)
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)


@contextlib.contextmanager
def _explained(ranks: Ranks, backend: str, timeout: timedelta, calling: JoinMonitor) -> Iterator[None]:
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
    connections = _CONNECTIONS_OF_A_RANK * ranks.world_size
    needed = connections + _FEWEST_OTHER_FILES
    if ranks.rank == 0 and not is_agents and allow_open_files(connections + _OTHER_FILES) < needed:
        raise LaunchError(
            f"Rank 0 holds the store at which {ranks.world_size:,} ranks meet, with {_CONNECTIONS_OF_A_RANK} "
            f"connections of each, and may not have the {needed:,} files open that this takes. Raise the hard limit of "
            f"its machine (ulimit -Hn {needed} as administrator; LimitNOFILE of the service that starts jobs), or "
            "start the ranks with torchrun, whose agent holds the store."
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


def _own_keys(timeout: timedelta) -> dist.Store:
    """The store at the common address, with keys that an earlier mesh of the same processes has not used.

    The store may outlive a mesh, under torchrun always. Its entries say where the ranks listened, and torch gives them
    the same names again: a second mesh would wait for connections to addresses that are gone.
    """
    store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return dist.PrefixStore(f"mesh{store.add(f'meshes_of_rank{rank}', 1)}", store)


def _check_address(ranks: Ranks) -> None:
    """Says at once that a host name does not resolve, which every rank would retry in silence until its timeout.

    Refuses it only on nodes of a scheduler: the name of a pod or container may start to resolve later.
    """
    started = "" if ranks.launcher == "environment" else f" (started by {ranks.launcher})"
    for left in reversed(range(_LOOKUP_TRIES)):
        try:
            socket.getaddrinfo(ranks.master_address, ranks.master_port)
            return
        except (OSError, UnicodeError) as failure:
            text = (
                f"Rank {ranks.rank} of {ranks.world_size} cannot look up {ranks.master_address!r}, the host of rank "
                f"0{started}: {getattr(failure, 'strerror', None) or failure}. Set MASTER_ADDR to a "
                "name or IP address of that host that all nodes can resolve."
            )
            if not ranks.is_foreign_job:
                log.warning(f"{text} It is looked up again until --distributed-timeout-minutes are over.")
                return
            if left == 0:
                raise LaunchError(text) from failure
            time.sleep(1)


@final
class JoinMonitor:
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
        self._look_seconds = max(_LOOK_SECONDS, size / _LOOKS_OF_ALL_RANKS)
        self._store: dist.Store | None = None
        self._holder: ProcessIdentity | None = None
        self._until = time.monotonic() + limit_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._guard, name="roll-call", daemon=True)

    def __enter__(self) -> JoinMonitor:
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
            self._store.set(f"{_ANSWERED}/{self._rank}", "yes")
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
            if self.is_late or store.check([_GAVE_UP]):
                failure = self.missing()
                if failure is not None:
                    raise failure
                if time.monotonic() > self._until + self._limit_seconds:  # one has answered, and ended since
                    raise HangError(self._unknown())
            time.sleep(self._look_seconds)
        if store.check([_GAVE_UP]):
            store.set(f"{_ANSWERED}/{self._rank}", "yes")  # to whoever came to look just before the last rank came
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
        if self._store is None:
            return 0, self._sentence([0], {})
        answers: list[dict[str, Any]] = []
        has_answered = threading.Event()

        def ask(store: dist.Store) -> None:
            with contextlib.suppress(RuntimeError):  # the rank that held the store has ended
                store.set(f"{_ANSWERED}/{self._rank}", "yes")
                has_answered.set()
                answers.append(self._published(store))
            has_answered.set()

        thread = threading.Thread(target=ask, args=(self._store,), daemon=True)
        thread.start()
        if has_answered.wait(_ANSWER_SECONDS + 1.0):
            thread.join(_ACCOUNT_SECONDS)
        if answers:
            absent: list[int] = answers[0]["ranks"]
            came = {int(rank): ProcessIdentity(**entry) for rank, entry in answers[0]["came"].items()}
        elif self._holder is not None and self._holder.is_stopped():
            absent, came = [0], {0: self._holder}
        else:
            return (self._rank, self._unknown()) if thread.is_alive() else None
        for process in came.values():
            process.kill()  # nobody else would, if no launcher does: it does not run
        return (absent[0], self._sentence(absent, came)) if absent else None

    def _sentence(self, absent: Sequence[int], came: Mapping[int, ProcessIdentity]) -> str:
        shown = [f"{rank}" + (f" ({came[rank]})" if rank in came else "") for rank in absent[:_MOST_NAMED]]
        shown += [f"{len(absent) - _MOST_NAMED:,} more"] if len(absent) > _MOST_NAMED else []
        return (
            f"rank {', '.join(shown)} {'has' if len(absent) == 1 else 'have'} not joined the other ranks of "
            f"{self._size} at {self._address} within {self._limit_seconds:g} s (--distributed-timeout-minutes): "
            "stopped, dead or cut off. See the log of that rank and its machine, then run the same command again."
        )

    def _unknown(self) -> str:
        return (
            f"rank {self._rank} waited {self._limit_seconds:g} s (--distributed-timeout-minutes) for the other ranks "
            f"of {self._size}; which of them are missing is unknown, because the store at {self._address} does not "
            "say. See the log of rank 0 and its machine, then run the same command again."
        )

    def _published(self, store: dist.Store) -> dict[str, Any]:
        """The missing ranks, in order, and the processes of those that came: the first rank to ask finds them."""
        store.set(_GAVE_UP, "yes")
        turn = store.add(_TURNS, 0)
        if store.add(f"{_FINDERS}/{turn}", 1) == 1:
            absent, came = self._absent(store)
            entries = {rank: dataclasses.asdict(process) for rank, process in came.items()}
            if not absent:  # the last of them has come by now: whoever gives up later looks again
                store.delete_key(_GAVE_UP)
                store.add(_TURNS, 1)
            store.set(f"{_ACCOUNT}/{turn}", json.dumps({"ranks": absent, "came": entries}))
        while not store.check([f"{_ACCOUNT}/{turn}"]):
            time.sleep(self._look_seconds)
        account: dict[str, Any] = json.loads(store.get(f"{_ACCOUNT}/{turn}"))
        self._let_others_read(store, turn, self._size - len(account["ranks"]) if account["ranks"] else 0)
        return account

    def _let_others_read(self, store: dist.Store, turn: int, count: int) -> None:
        """Keeps rank 0, with which the store may end, until so many ranks have read who is missing."""
        readers, until = store.add(f"{_READERS}/{turn}", 1), time.monotonic() + _ANSWER_SECONDS + self._look_seconds
        while self._rank == 0 and readers < count and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            readers = store.add(f"{_READERS}/{turn}", 0)

    def _absent(self, store: dist.Store) -> tuple[list[int], dict[int, ProcessIdentity]]:
        """The ranks that have not come; if all have, those that neither are connected nor gave up as this one did, and
        the processes of these. One that comes a moment too late is not among them: it runs.
        """
        everyone = range(self._size)
        late = _lacking(store, _FIRST, everyone)
        until = time.monotonic() + _ANSWER_SECONDS + self._look_seconds
        while not late and time.monotonic() < until and not _have_all(store, _ANSWERED, everyone):
            time.sleep(self._look_seconds)
        if late:
            return late, {}
        silent = _lacking(store, _ANSWERED, everyone)
        return silent, {rank: process for rank in silent[:_MOST_NAMED] if (process := _identity(store, rank))}


def _have_all(store: dist.Store, note: str, ranks: range) -> bool:
    starts = range(0, len(ranks), _KEYS_OF_A_QUESTION)
    return all(store.check([f"{note}/{rank}" for rank in ranks[at : at + _KEYS_OF_A_QUESTION]]) for at in starts)


def _lacking(store: dist.Store, note: str, ranks: range) -> list[int]:
    """The ranks that have left no note, by halves: a question is about up to 1,024 of them."""
    if not ranks or (len(ranks) <= _KEYS_OF_A_QUESTION and _have_all(store, note, ranks)):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return [*_lacking(store, note, ranks[:middle]), *_lacking(store, note, ranks[middle:])]


def _identity(store: dist.Store, rank: int) -> ProcessIdentity | None:
    """The process of a rank, if it has come."""
    if not store.check([f"{_FIRST}/{rank}"]):
        return None
    return ProcessIdentity(**json.loads(store.get(f"{_FIRST}/{rank}")))


def _end(code: int, text: str, rank: int) -> None:
    process_exit.record_failure(code, text)
    log.error(text, rank=rank)
    process_exit.end_process(code, text, is_shown=True)
