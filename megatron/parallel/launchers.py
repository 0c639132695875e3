"""Rank, world size and rendezvous from the variables of torchrun, deepspeed, srun, MPI, Flux, jsrun or a shell."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.errors import LaunchError
from megatron.slurm import expand_hostlist

LAUNCH_VARIABLE = "MEGATRON_LAUNCHER"
"""Set by tools/launch.py for its ranks, which must not outlive it."""

_DEFAULT_PORT = 29500  # torch's own
_LOWEST_JOB_PORT, _JOB_PORTS = 10_000, 20_000  # below Linux's ephemeral ports (32768 and up)
# Slurm numbers its own steps from here: interactive, batch script, extern. They are not srun steps.
_FIRST_SLURM_SPECIAL_STEP = 0xFFFFFFF0
_LOCAL_RANK_NAMES = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "PALS_LOCAL_RANKID",
    "PMI_LOCAL_RANK",
    "SLURM_LOCALID",
)
_LOCAL_SIZE_NAMES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "PMI_LOCAL_SIZE",
)
# Variables of the rank and of the world size, and the launcher that sets them. PALS (Cray's mpiexec) sets PMI's.
_MPI_NAMES = (
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "jsrun"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "mpirun"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "mpirun"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "flux run"),
    ("PMI_RANK", "PMI_SIZE", "mpirun"),
)
_PASSING = {"mpirun": "mpirun -x", "jsrun": "jsrun -E", "flux run": "flux run --env"}
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "FLUX_JOB_ID", "PALS_APID", "PBS_JOBID", "LSB_JOBID")


@dataclass(frozen=True)
class Ranks:
    """This process's rank, the world size, and the address of the rendezvous.

    Args:
        launcher: torchrun, deepspeed, launch (tools/launch.py), srun, mpirun, jsrun, flux run, environment (variables
            set by hand) or none.
        is_one_node: all ranks are known to run on this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    launcher: str
    is_one_node: bool = False

    @property
    def has_parent_launcher(self) -> bool:
        """True if the parent process is a launcher, not a shell."""
        return self.launcher not in ("environment", "none")

    @property
    def is_foreign_job(self) -> bool:
        """True if a scheduler or MPI started the ranks and chose their devices and addresses."""
        return self.launcher in ("srun", "mpirun", "jsrun", "flux run")


def discover_ranks(environ: Mapping[str, str], *, local_rank: int | None = None, parent_process_id: int = 0) -> Ranks:
    """Reads the launcher's variables; the result depends only on the arguments.

    RANK takes precedence (with one torchrun per node under srun, both kinds are set), then MPI's variables, then those
    of an srun step. Slurm's variables outside a step (salloc, sbatch script) mean a single process.

    Args:
        local_rank: the value of `--local_rank`, used if no variable sets it.
        parent_process_id: distinguishes MPI jobs on one machine that have no job id.

    Raises:
        LaunchError: variables are missing, not numbers, or contradict each other.
    """
    if _given(environ, "RANK"):
        return _from_environment(environ, local_rank)
    for rank_name, size_name, launcher in _MPI_NAMES:
        if _given(environ, rank_name) and _given(environ, size_name):
            return _from_mpi(environ, local_rank, rank_name, size_name, launcher, parent_process_id)
    if _in_slurm_step(environ):
        return _from_slurm(environ)
    lone = ((name, "WORLD_SIZE", "") for name in ("RANK", "PMIX_RANK", *_LOCAL_RANK_NAMES))
    for rank_name, size_name, _ in (*lone, *_MPI_NAMES):
        _check_both(environ, rank_name, size_name)
    return Ranks(0, 1, 0, "127.0.0.1", _DEFAULT_PORT, "none", is_one_node=True)


def _from_environment(environ: Mapping[str, str], flag: int | None) -> Ranks:
    _check_both(environ, "RANK", "WORLD_SIZE")
    rank = _number(environ, "RANK")
    world_size = _number(environ, "WORLD_SIZE") if _given(environ, "WORLD_SIZE") else 1
    _check_rank(rank, world_size, "RANK", "WORLD_SIZE")
    if world_size > 1 and not _given(environ, "MASTER_ADDR"):
        raise LaunchError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set but MASTER_ADDR is not. "
            f"Set MASTER_ADDR to the host of rank 0."
        )
    if _given(environ, "TORCHELASTIC_RUN_ID"):
        launcher = "torchrun"
    elif _given(environ, LAUNCH_VARIABLE):
        launcher = "launch"
    else:
        launcher = "deepspeed" if _given(environ, "CROSS_SIZE") else "environment"
    local = _local_rank(environ, flag, rank, world_size)
    return Ranks(
        rank, world_size, local, _address(environ) or "127.0.0.1", _port(environ), launcher,
        is_one_node=_local_size(environ, world_size) == world_size,
    )  # fmt: skip


def _from_mpi(
    environ: Mapping[str, str],
    flag: int | None,
    rank_name: str,
    size_name: str,
    launcher: str,
    parent_process_id: int,
) -> Ranks:
    rank, world_size = _number(environ, rank_name), _number(environ, size_name)
    _check_rank(rank, world_size, rank_name, size_name)
    _check_world_size(environ, world_size, size_name)
    is_one_node = _local_size(environ, world_size) == world_size
    local = _local_rank(environ, flag, rank, world_size)
    address = _address(environ) or ("127.0.0.1" if is_one_node else _first_slurm_host(environ))
    if address is None:
        raise LaunchError(
            f"{launcher} started {world_size} ranks ({size_name}={world_size}) on several nodes and MASTER_ADDR is not "
            f"set. Pass the host of rank 0, for instance with {_PASSING[launcher]} MASTER_ADDR=HOST."
        )
    job = next((environ[name] for name in _JOB_NAMES if environ.get(name)), None)
    if job is None:
        job = _slurm_job(environ) or (str(parent_process_id) if is_one_node else None)
    return Ranks(rank, world_size, local, address, _port(environ, job), launcher, is_one_node)


def _from_slurm(environ: Mapping[str, str]) -> Ranks:
    size_name = "SLURM_STEP_NUM_TASKS" if _given(environ, "SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    rank, world_size = _number(environ, "SLURM_PROCID"), _number(environ, size_name)
    _check_rank(rank, world_size, "SLURM_PROCID", size_name)
    _check_world_size(environ, world_size, size_name)
    nodes_name = next((name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if _given(environ, name)), None)
    is_one_node = world_size == 1 or (nodes_name is not None and _number(environ, nodes_name) == 1)
    address = _address(environ) or ("127.0.0.1" if is_one_node else _first_slurm_host(environ))
    if address is None:
        raise LaunchError(
            f"srun started {world_size} ranks ({size_name}={world_size}) but neither SLURM_STEP_NODELIST nor "
            f"SLURM_JOB_NODELIST names the nodes. Set MASTER_ADDR to the host of rank 0."
        )
    local = _number(environ, "SLURM_LOCALID")
    return Ranks(rank, world_size, local, address, _port(environ, _slurm_job(environ)), "srun", is_one_node)


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    return step.isdigit() and int(step) < _FIRST_SLURM_SPECIAL_STEP and _given(environ, "SLURM_PROCID")


def _slurm_job(environ: Mapping[str, str]) -> str | None:
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    return None if job is None else f"{job}.{environ.get('SLURM_STEP_ID', '')}"


def _first_slurm_host(environ: Mapping[str, str]) -> str | None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if _given(environ, name):
            return expand_hostlist(environ[name])[0]
    return None


def _local_rank(environ: Mapping[str, str], flag: int | None, rank: int, world_size: int) -> int:
    name = next((name for name in _LOCAL_RANK_NAMES if _given(environ, name)), None)
    if name is not None:
        local = _number(environ, name)
    elif flag is not None and flag >= 0:
        name, local = "--local_rank", flag
    elif world_size == 1 or _local_size(environ, world_size) == world_size:
        return rank
    else:
        raise LaunchError(
            f"The local rank of rank {rank} of {world_size} is unknown: LOCAL_RANK is not set and --local_rank was not "
            f"passed. Set LOCAL_RANK (0 for the first process of a node)."
        )
    size = _local_size(environ, world_size)
    if local < 0 or (size is not None and local >= size) or local >= world_size > 1:
        raise LaunchError(
            f"{name}={local} does not fit {size or world_size} processes on the node (WORLD_SIZE={world_size}). It "
            f"must be between 0 and {(size or world_size) - 1}; unset it if another job left it behind."
        )
    return local


def _local_size(environ: Mapping[str, str], world_size: int) -> int | None:
    if world_size == 1:
        return None
    name = next((name for name in _LOCAL_SIZE_NAMES if _given(environ, name)), None)
    if name is None:
        return world_size if environ.get("FLUX_JOB_NNODES") == "1" else None
    return _number(environ, name)


def _address(environ: Mapping[str, str]) -> str:
    """The address of rank 0, without the brackets around an IPv6 address; empty if not set."""
    return environ.get("MASTER_ADDR", "").strip().removeprefix("[").removesuffix("]")


def _port(environ: Mapping[str, str], job: str | None = None) -> int:
    if _given(environ, "MASTER_PORT"):
        port = _number(environ, "MASTER_PORT")
        if not 0 < port < 65536:
            raise LaunchError(f"MASTER_PORT={port} is not a TCP port. It must be between 1 and 65535.")
        return port
    return _DEFAULT_PORT if job is None else _LOWEST_JOB_PORT + zlib.crc32(job.encode()) % _JOB_PORTS


def _check_both(environ: Mapping[str, str], rank_name: str, size_name: str) -> None:
    """Raises if only one of rank and world size is set and its value implies several ranks."""
    if not _given(environ, rank_name) and _given(environ, size_name) and _number(environ, size_name) != 1:
        raise LaunchError(
            f"{size_name}={environ[size_name]} is set but {rank_name} is not, so the rank of this process is unknown. "
            "Start it with torchrun, deepspeed, srun or mpirun, or set RANK and WORLD_SIZE; unset "
            f"{size_name} for a single process."
        )
    if not _given(environ, size_name) and _given(environ, rank_name) and _number(environ, rank_name) > 0:
        raise LaunchError(
            f"{rank_name}={environ[rank_name]} is set but {size_name} is not, so the number of ranks is unknown. Start "
            "the ranks with torchrun, deepspeed, srun or mpirun, or set RANK and WORLD_SIZE; unset "
            f"{rank_name} for a single process."
        )


def _check_rank(rank: int, world_size: int, rank_name: str, size_name: str) -> None:
    if world_size < 1:
        raise LaunchError(
            f"{size_name}={world_size} is not a number of ranks. It must be at least 1; unset {rank_name} and "
            f"{size_name} for a single process."
        )
    if not 0 <= rank < world_size:
        advice = "set both variables, or use torchrun, which sets them"
        if rank_name != "RANK":
            advice = f"unset both if another job left them behind, and start the ranks with {_starter(rank_name)}"
        raise LaunchError(
            f"{rank_name}={rank} does not fit {size_name}={world_size}. A rank must be between 0 and {world_size - 1}; "
            f"{advice}."
        )


def _starter(rank_name: str) -> str:
    return next((launcher for name, _, launcher in _MPI_NAMES if name == rank_name), "srun")


def _check_world_size(environ: Mapping[str, str], world_size: int, size_name: str) -> None:
    if _given(environ, "WORLD_SIZE") and _number(environ, "WORLD_SIZE") != world_size:
        raise LaunchError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} contradicts {size_name}={world_size}. Unset WORLD_SIZE, or start that "
            f"many processes."
        )


def _given(environ: Mapping[str, str], name: str) -> bool:
    return bool(environ.get(name))


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text:
        raise LaunchError(
            f"{name} is not set, although other variables of a launcher are. Start this process with that launcher, or "
            f"unset the variables if another job left them behind."
        )
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"{name}={text!r} is not an integer. The launcher sets it; unset it if another job left it behind."
        ) from None
