"""The Slurm job around a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.errors import LaunchError
from megatron.launch.hostlist import expand_hostlist


@dataclass(frozen=True)
class SlurmJob:
    """The nodes that Slurm gave to a job, as its batch script or shell sees them.

    Args:
        hosts: in Slurm's order; rank 0 runs on the first.
        tasks_per_node: as asked for, else one for each GPU of this node; None if Slurm says neither.
        master_address: the value of MASTER_ADDR, if it is set.
    """

    job: str
    hosts: tuple[str, ...]
    tasks_per_node: int | None
    master_address: str | None

    @property
    def command(self) -> str:
        """What starts a rank for each task."""
        return f"srun --nodes={len(self.hosts)} --ntasks-per-node={self.tasks_per_node or 1} python -u"


def find_slurm_job(environ: Mapping[str, str]) -> SlurmJob | None:
    """The job around this process; None outside of one.

    Raises:
        LaunchError: the node list or a number cannot be read.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodelist:
        return None
    tasks_name = next((name for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE") if environ.get(name)), None)
    return SlurmJob(
        environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "?",
        tuple(expand_hostlist(nodelist)),
        None if tasks_name is None else _number(environ, tasks_name),
        environ.get("MASTER_ADDR") or None,
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise LaunchError(
            f"{name}={text!r} is not a number of tasks. Slurm sets it; unset it if another job left it behind."
        )
    return int(text)
