"""Launcher discovery: which variables win, what they mean, and what is refused."""

from __future__ import annotations

import pytest

from megatron.errors import LaunchError
from megatron.parallel.launchers import discover_ranks

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head", "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "4", "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
}  # fmt: skip
ALLOCATION = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "a",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-1",
}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}
PALS = {
    "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4", "PALS_LOCAL_RANKID": "1",
    "PALS_RANKID": "5", "PBS_JOBID": "123.polaris", "MASTER_ADDR": "x1",
}  # fmt: skip
FLUX = {
    "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2", "MASTER_ADDR": "h",
}  # fmt: skip
JSRUN = {
    "JSM_NAMESPACE_RANK": "7", "JSM_NAMESPACE_SIZE": "12", "JSM_NAMESPACE_LOCAL_RANK": "1", "LSB_JOBID": "9",
    "MASTER_ADDR": "h1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environ", "flag", "expected"),
    [
        (TORCHRUN, None, (3, 4, 1, "head", 1234, "torchrun")),
        ({**BY_HAND, "LOCAL_RANK": "1", "MEGATRON_LAUNCHER": "1"}, None, (1, 2, 1, "h", 29500, "launch")),
        (DEEPSPEED, None, (1, 2, 1, "127.0.0.1", 29500, "deepspeed")),
        (DEEPSPEED, 0, (1, 2, 1, "127.0.0.1", 29500, "deepspeed")),
        ({**TORCHRUN, **SRUN}, None, (3, 4, 1, "head", 1234, "torchrun")),
        ({**TORCHRUN, **ALLOCATION}, None, (3, 4, 1, "head", 1234, "torchrun")),
        ({**OPEN_MPI, **SRUN}, None, (1, 2, 1, "127.0.0.1", None, "mpirun")),
        ({**SRUN, "MASTER_PORT": "6000"}, None, (5, 8, 1, "gpu03", 6000, "srun")),
        ({**SRUN, "MASTER_ADDR": "x", "MASTER_PORT": "6000"}, None, (5, 8, 1, "x", 6000, "srun")),
        (ALLOCATION, None, (0, 1, 0, "127.0.0.1", None, "none")),
        ({**ALLOCATION, "SLURM_STEP_ID": "4294967290"}, None, (0, 1, 0, "127.0.0.1", None, "none")),
        (HYDRA, None, (0, 2, 0, "127.0.0.1", None, "mpirun")),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "9994", "RANK": "0", "LOCAL_RANK": "0"}, None,
         (0, 1, 0, "localhost", 9994, "environment")),
        (BY_HAND, 1, (1, 2, 1, "h", 29500, "environment")),
        ({**BY_HAND, "SLURM_LOCALID": "1"}, None, (1, 2, 1, "h", 29500, "environment")),
        ({**BY_HAND, "LOCAL_WORLD_SIZE": "2"}, None, (1, 2, 1, "h", 29500, "environment")),
        ({}, None, (0, 1, 0, "127.0.0.1", None, "none")),
        ({}, 0, (0, 1, 0, "127.0.0.1", None, "none")),
        ({"LOCAL_RANK": "0", "PMIX_RANK": "0"}, None, (0, 1, 0, "127.0.0.1", None, "none")),
        (PALS, None, (5, 8, 1, "x1", None, "mpirun")),
        ({**FLUX, "PMI_RANK": "3", "PMI_SIZE": "4"}, None, (3, 4, 1, "h", None, "flux run")),
        ({**FLUX, "MASTER_ADDR": "", "FLUX_JOB_NNODES": "1"}, None, (3, 4, 1, "127.0.0.1", None, "flux run")),
        (JSRUN, None, (7, 12, 1, "h1", None, "jsrun")),
        ({**BY_HAND, "LOCAL_RANK": "0", "MASTER_ADDR": " [::1]"}, None, (1, 2, 0, "::1", 29500, "environment")),
        ({"RANK": "", "WORLD_SIZE": "1"}, None, (0, 1, 0, "127.0.0.1", None, "none")),
    ],
)  # fmt: skip
def test_every_launcher_is_read(environ: dict[str, str], flag: int | None, expected: tuple) -> None:
    found = discover_ranks(environ, local_rank=flag)
    rank, world_size, local_rank, address, port, launcher = expected
    assert (found.rank, found.world_size, found.local_rank) == (rank, world_size, local_rank)
    assert (found.master_address, found.launcher) == (address, launcher)
    assert port is None or found.master_port == port
    assert found.has_parent_launcher == (launcher not in ("environment", "none"))


def test_port_is_the_jobs_own() -> None:
    ports = {discover_ranks({**SRUN, "SLURM_JOB_ID": str(job)}).master_port for job in range(50)}
    assert len(ports) > 45
    assert all(10_000 <= port < 30_000 for port in ports)
    assert discover_ranks(SRUN) == discover_ranks(dict(SRUN))
    assert discover_ranks({**SRUN, "SLURM_STEP_ID": "1"}).master_port != discover_ranks(SRUN).master_port
    one, other = (discover_ranks(HYDRA, parent_process_id=parent).master_port for parent in (100, 200))
    assert one != other


def test_a_single_node_is_recognized() -> None:
    assert discover_ranks(OPEN_MPI).is_one_node
    assert discover_ranks(DEEPSPEED).is_one_node
    assert not discover_ranks(TORCHRUN).is_one_node
    assert not discover_ranks(SRUN).is_one_node
    assert discover_ranks({**SRUN, "SLURM_STEP_NUM_NODES": "1"}).master_address == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "flag", "words"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "h"}, None, "RANK=4 does not fit WORLD_SIZE=4"),
        ({"RANK": "1"}, None, "RANK=1 is set but WORLD_SIZE is not, so the number of ranks is unknown"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, None, "WORLD_SIZE=0 is not a number of ranks. It must be at least 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None, "MASTER_ADDR is not"),
        ({"RANK": "zero"}, None, "RANK='zero' is not an integer"),
        ({"WORLD_SIZE": "2"}, None, "WORLD_SIZE=2 is set but RANK is not"),
        ({"FLUX_JOB_SIZE": "4"}, None, "FLUX_JOB_SIZE=4 is set but FLUX_TASK_RANK is not"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, None, "OMPI_COMM_WORLD_SIZE=4 is set but OMPI_COMM_WORLD_RANK is not"),
        ({"PMI_RANK": "2"}, None, "PMI_RANK=2 is set but PMI_SIZE is not, so the number of ranks is unknown"),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "a"}, None, "PMIX_RANK=3 is set but WORLD_SIZE is not, so the number"),
        ({"LOCAL_RANK": "1"}, None, "LOCAL_RANK=1 is set but WORLD_SIZE is not, .* unset LOCAL_RANK for a single"),
        ({"PALS_LOCAL_RANKID": "1"}, None, "PALS_LOCAL_RANKID=1 is set but WORLD_SIZE is not"),
        ({**JSRUN, "MASTER_ADDR": ""}, None, "jsrun started 12 ranks .* jsrun -E MASTER_ADDR=HOST"),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h"}, None, "LOCAL_RANK is not set and --local_rank was not"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, None, "LOCAL_RANK=2 does not fit 2 processes"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, 2, "--local_rank=2 does not fit 2 processes"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, None, "MASTER_PORT=70000 is not a TCP port"),
        ({**SRUN, "WORLD_SIZE": "4"}, None, "WORLD_SIZE=4 contradicts SLURM_STEP_NUM_TASKS=8"),
        ({**OPEN_MPI, "WORLD_SIZE": "4"}, None, "WORLD_SIZE=4 contradicts OMPI_COMM_WORLD_SIZE=2"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, None,
         "mpirun -x MASTER_ADDR=HOST"),
        ({**SRUN, "SLURM_PROCID": "8"}, None, "SLURM_PROCID=8 does not fit SLURM_STEP_NUM_TASKS=8.*ranks with srun"),
        ({**SRUN, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, None, "neither SLURM_STEP_NODELIST nor"),
        ({**SRUN, "SLURM_LOCALID": ""}, None, "SLURM_LOCALID is not set, although other variables"),
    ],
)  # fmt: skip
def test_contradictions_are_rejected(environ: dict[str, str], flag: int | None, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        discover_ranks(environ, local_rank=flag)
