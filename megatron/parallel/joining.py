"""Joining and leaving a run: from the launcher's variables to an open mesh."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from megatron import device, log
from megatron.config import ParallelRequest
from megatron.errors import LaunchError, PeerLostError
from megatron.launch.slurm_job import SlurmJob, find_slurm_job
from megatron.parallel.launcher_death import die_with_deepspeed_runner, die_with_launcher
from megatron.parallel.launchers import Ranks
from megatron.parallel.mesh import ParallelMesh, build_mesh, standard_axes
from megatron.parallel.rank_start import launched_ranks

_LOOKUP_TRIES = 3  # one second apart


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
    tp_size, pp_size = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    sizes = standard_axes(ranks.world_size, tp=tp_size, pp=pp_size)
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
    if not dist.is_initialized():
        _join(ranks, backend, timeout)
    log.set_rank(ranks.rank, ranks.world_size)
    return build_mesh(sizes, own_device, ranks.local_rank, timeout)


def count_ranks(parallel: ParallelRequest) -> int:
    """How many processes the launcher started; needs no contact with them.

    Raises:
        LaunchError: the launcher's variables contradict each other.
    """
    ranks = launched_ranks(parallel.local_rank)
    log.set_rank(ranks.rank, ranks.world_size)
    return ranks.world_size


def rendezvous() -> tuple[str, int]:
    """Host and port at which the ranks of an open mesh found each other."""
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
    if mesh.world.group is not None and dist.is_initialized():
        dist.destroy_process_group()


def _export(ranks: Ranks) -> None:
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


def _join(ranks: Ranks, backend: str, timeout: timedelta) -> None:
    if ranks.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if ranks.launcher in ("srun", "mpirun"):
        _check_address(ranks)
    try:
        store = _own_keys(timeout)
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as failure:
        # A rank that is not there may have died while it started; anything else is wrong again at the next start.
        kind = PeerLostError if "timed out" in str(failure).lower() else LaunchError
        raise kind(
            f"Rank {ranks.rank} of {ranks.world_size} could not join the others at {ranks.master_address}:"
            f"{ranks.master_port} (started by {ranks.launcher}, backend {backend}, --distributed-timeout-minutes "
            f"{timeout.total_seconds() / 60:g}): {str(failure).splitlines()[0].rstrip('.')}. Check that every rank is "
            f"running and can reach that address; if the port is taken, set another MASTER_PORT."
        ) from failure


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
