"""The Slurm job around a process, from its variables."""

from __future__ import annotations

import pytest

from megatron.errors import LaunchError
from megatron.launch.slurm import find_slurm_job

BATCH = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[003-007,011]"}


def test_a_job_is_read() -> None:
    assert find_slurm_job({}) is None
    job = find_slurm_job({**BATCH, "SLURM_GPUS_ON_NODE": "4"})
    assert job is not None and (job.job, job.hosts[0], len(job.hosts), job.master_address) == ("77", "node003", 6, None)
    assert job.command == "srun --nodes=6 --ntasks-per-node=4 python -u"
    asked = find_slurm_job({**BATCH, "SLURM_GPUS_ON_NODE": "4", "SLURM_NTASKS_PER_NODE": "2", "MASTER_ADDR": "x"})
    assert asked is not None and (asked.tasks_per_node, asked.master_address) == (2, "x")
    bare = find_slurm_job(BATCH)
    assert bare is not None and bare.tasks_per_node is None and "--ntasks-per-node=1 " in bare.command


@pytest.mark.parametrize("text", ["two", "0", "-1"])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=f"SLURM_NTASKS_PER_NODE='{text}' is not a number of tasks"):
        find_slurm_job({"SLURM_JOB_NODELIST": "a", "SLURM_NTASKS_PER_NODE": text})
