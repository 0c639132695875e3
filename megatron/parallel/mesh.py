"""The grid of ranks: which process this is, and its place on the tensor, pipeline and data axes."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron import device, log
from megatron.config import ParallelRequest
from megatron.errors import LaunchError
from megatron.parallel.launchers import Ranks, discover_ranks

_PR_SET_PDEATHSIG = 1  # prctl(2)
# Words in a launcher's command line: they tell one that is process 1 of a container from an init that adopted us.
_LAUNCHER_WORDS = ("torch", "deepspeed", "mpi", "orte", "prte", "hydra", "pmi_proxy", "slurm", "srun")
_NAME_TRIES = 3  # one second apart


@dataclass(frozen=True)
class Axis:
    """One direction of the grid as this rank sees it.

    Args:
        rank: this process's position on the axis.
        ranks: the global ranks on the axis, in order.
        group: their process group; None only where no process group was opened.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @classmethod
    def single(cls, name: str, rank: int = 0) -> Axis:
        """An axis with this process alone on it."""
        return cls(name, 0, 1, (rank,), None)


@dataclass(frozen=True)
class ParallelMesh:
    """This rank's place: global rank = `(pp * DP + dp) * TP + tp`, DeepSpeed's order."""

    tp: Axis
    pp: Axis
    dp: Axis
    world: Axis
    device: torch.device
    local_rank: int = 0

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the head and sees the loss."""
        return self.pp.rank == self.pp.size - 1

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> ParallelMesh:
        """A mesh of this process alone, without a process group."""
        tp, pp, dp, world = (Axis.single(name) for name in ("tp", "pp", "dp", "world"))
        return cls(tp, pp, dp, world, torch.device(device))


def open_mesh(parallel: ParallelRequest) -> ParallelMesh:
    """Joins the other ranks and returns this one's place among them.

    Works under torchrun, the deepspeed launcher, srun, mpirun, hand-set variables, or none of them (one process; no
    network is used then). Afterwards torchrun's variables are set in the environment whoever started the process,
    because DeepSpeed reads them. A rank started by a launcher is killed when the launcher dies.

    Raises:
        LaunchError: the launcher's variables contradict each other, tp x pp does not fit the world, or there are not
        enough GPUs.
    """
    ranks = discover_ranks(os.environ, local_rank=parallel.local_rank, parent_process_id=os.getppid())
    tp_size, pp_size = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    check_layout(ranks.world_size, tp_size, pp_size)
    if ranks.has_parent_launcher:
        die_with_launcher()
    if ranks.launcher == "deepspeed":
        die_with_deepspeed_runner()
    own_device = device.local_device(
        ranks.local_rank, one_device_per_process=ranks.launcher in ("srun", "mpirun", "environment")
    )
    _export(ranks)
    backend = parallel.distributed_backend or device.default_backend()
    if not dist.is_initialized():
        _join(ranks, backend, timedelta(minutes=parallel.distributed_timeout_minutes))
    log.set_rank(ranks.rank, ranks.world_size)
    tp, pp, dp = build_axes(ranks.rank, ranks.world_size, tp_size, pp_size)
    world = Axis("world", ranks.rank, ranks.world_size, tuple(range(ranks.world_size)), dist.group.WORLD)
    return ParallelMesh(tp, pp, dp, world, own_device, ranks.local_rank)


def count_ranks(parallel: ParallelRequest) -> int:
    """How many processes the launcher started, before any of them is joined.

    Raises:
        LaunchError: the launcher's variables contradict each other.
    """
    ranks = discover_ranks(os.environ, local_rank=parallel.local_rank, parent_process_id=os.getppid())
    log.set_rank(ranks.rank, ranks.world_size)
    return ranks.world_size


def close_mesh(mesh: ParallelMesh) -> None:
    """Leaves the process group; does nothing for a mesh that has none."""
    if mesh.world.group is not None and dist.is_initialized():
        dist.destroy_process_group()


def check_layout(world_size: int, tp_size: int, pp_size: int) -> None:
    """Checks that whole model copies fill the world.

    Raises:
        LaunchError: tp x pp does not divide the number of processes.
    """
    copies, rest = divmod(world_size, tp_size * pp_size)
    if rest == 0 and copies > 0:
        return
    needed = tp_size * pp_size
    counts = f"{needed}" if copies == 0 else f"{copies * needed} or {(copies + 1) * needed}"
    layouts = [f"{tp} x {world}" for tp, world in _legal_layouts(world_size, tp_size)]
    raise LaunchError(
        f"{world_size} processes cannot hold whole model copies of {tp_size} x {pp_size} = {needed} ranks "
        f"(--tensor-model-parallel-size {tp_size}, --pipeline-model-parallel-size {pp_size}). Their product must "
        f"divide the number of processes: start {counts} processes, or use one of these tensor x pipeline sizes: "
        f"{', '.join(layouts)}."
    )


def axis_ranks(world_size: int, tp_size: int, pp_size: int) -> dict[str, list[tuple[int, ...]]]:
    """The global ranks of every group of every axis, groups in the order in which all ranks create them."""
    dp_size = world_size // (tp_size * pp_size)

    def number(pp: int, dp: int, tp: int) -> int:
        return (pp * dp_size + dp) * tp_size + tp

    stages, copies, parts = range(pp_size), range(dp_size), range(tp_size)
    return {
        "tp": [tuple(number(pp, dp, tp) for tp in parts) for pp in stages for dp in copies],
        "pp": [tuple(number(pp, dp, tp) for pp in stages) for dp in copies for tp in parts],
        "dp": [tuple(number(pp, dp, tp) for dp in copies) for pp in stages for tp in parts],
    }


def build_axes(rank: int, world_size: int, tp_size: int, pp_size: int) -> tuple[Axis, Axis, Axis]:
    """Creates the process groups of all axes and returns this rank's: tp, pp, dp.

    A collective call of the whole world. Groups of one rank are real groups too: DeepSpeed reads None as "everybody".
    """
    own: dict[str, Axis] = {}
    for name, groups in axis_ranks(world_size, tp_size, pp_size).items():
        for members in groups:
            group = dist.new_group(list(members)) if world_size > 1 else dist.group.WORLD
            if rank in members:
                own[name] = Axis(name, members.index(rank), len(members), members, group)
    return own["tp"], own["pp"], own["dp"]


def die_with_launcher() -> None:
    """Asks Linux to kill this process when the one that started it ends; elsewhere does nothing.

    Without it ranks outlive a launcher that was killed by SIGKILL, and go on writing.

    Raises:
        LaunchError: the launcher is gone already.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or (parent == 1 and not _is_launcher(Path("/proc/1/cmdline"))):
        raise LaunchError(
            f"The launcher of this rank ended before the rank was ready (its parent process was {parent} and is now "
            f"{os.getppid()}). Start the job again."
        )


def die_with_deepspeed_runner() -> None:
    """Does the same for the `deepspeed` command, which is the parent of the process that starts the ranks of a node.

    A thread waits for its end; on another node, where ssh stands between, there is nothing to wait for.
    """
    if not hasattr(os, "pidfd_open"):
        return
    try:
        runner = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        if b"deepspeed" not in Path(f"/proc/{runner}/cmdline").read_bytes():
            return
        handle = os.pidfd_open(runner)
    except (OSError, ValueError, IndexError):
        return
    threading.Thread(target=_die_after, args=(handle,), name="deepspeed-runner", daemon=True).start()


def _die_after(handle: int) -> None:
    select.select([handle], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _is_launcher(command_line: Path) -> bool:
    try:
        text = command_line.read_bytes().decode(errors="replace").lower()
    except OSError:
        return True  # not ours to read: give it the benefit of the doubt
    return any(word in text for word in _LAUNCHER_WORDS)


def _legal_layouts(world_size: int, wanted_tp: int) -> Sequence[tuple[int, int]]:
    """Up to six (tp, pp) whose product divides the world, the nearest to the wanted tensor size first."""
    pairs = [
        (tp, pp)
        for tp in range(1, world_size + 1)
        for pp in range(1, world_size // tp + 1)
        if world_size % (tp * pp) == 0
    ]
    return sorted(pairs, key=lambda pair: (abs(pair[0] - wanted_tp), pair[1]))[:6]


def _export(ranks: Ranks) -> None:
    os.environ.update(
        RANK=str(ranks.rank),
        WORLD_SIZE=str(ranks.world_size),
        LOCAL_RANK=str(ranks.local_rank),
        MASTER_ADDR=ranks.master_address,
        MASTER_PORT=str(ranks.master_port),
    )
    if ranks.is_one_node and sys.platform.startswith("linux"):
        # gloo otherwise resolves the host's own name, which fails or is slow on many laptops and in containers
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _join(ranks: Ranks, backend: str, timeout: timedelta) -> None:
    if ranks.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if ranks.launcher in ("srun", "mpirun"):
        _check_address(ranks)
    try:
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as failure:
        raise LaunchError(
            f"Rank {ranks.rank} of {ranks.world_size} could not meet the others at {ranks.master_address}:"
            f"{ranks.master_port} (started by {ranks.launcher}, backend {backend}, --distributed-timeout-minutes "
            f"{timeout.total_seconds() / 60:g}): {str(failure).splitlines()[0].rstrip('.')}. Every rank must run and "
            f"reach that address; another MASTER_PORT helps if the port is taken."
        ) from failure


def _check_address(ranks: Ranks) -> None:
    """Refuses a host name that nobody knows, which torch would retry until its timeout, once on every rank.

    Only where the name comes from a list of nodes: that of a pod or container may become known later.
    """
    for left in reversed(range(_NAME_TRIES)):
        try:
            socket.getaddrinfo(ranks.master_address, ranks.master_port)
            return
        except socket.gaierror as failure:
            if left == 0:
                raise LaunchError(
                    f"Rank {ranks.rank} of {ranks.world_size} cannot look up {ranks.master_address!r}, the host of "
                    f"rank 0 (started by {ranks.launcher}): {failure.strerror}. Set MASTER_ADDR to a name or IP "
                    f"address of that host that all nodes know."
                ) from failure
            time.sleep(1)
