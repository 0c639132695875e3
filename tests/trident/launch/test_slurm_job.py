"""Host lists as Slurm writes them (test_slurm.py compares them with Slurm's own), and the variables of its job."""

from __future__ import annotations

import pytest

from megatron.errors import LaunchError
from megatron.slurm import expand_hostlist, find_slurm_job

BATCH = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[003-007,011]"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[003-005,011]", "node003 node004 node005 node011"),
        ("a, b[1-2],,c-d", "a b1 b2 c-d"),
        ("n[98-101],n[098-101]", "n98 n99 n100 n101 n098 n099 n100 n101"),
        ("r[1-2]n[09-10]", "r1n09 r1n10 r2n09 r2n10"),
        ("a[0-1]b[0-1]c[0-1]", "a0b0c0 a0b0c1 a1b0c0 a1b0c1 a0b1c0 a0b1c1 a1b1c0 a1b1c1"),
        ("n[1-2]-ib.cluster", "n1-ib.cluster n2-ib.cluster"),
        ("[1-2]", "1 2"),
    ],
)
def test_expansion_of_a_host_list(text: str, hosts: str) -> None:
    assert expand_hostlist(text) == hosts.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Cannot parse the host list ''"),
        (",", "Cannot parse the host list ','"),
        ("node[1-2", r"Cannot parse the host list 'node\[1-2'.*node\[003-007,011\]"),
        ("node1-2]", "Cannot parse the host list"),
        ("node[[1]]", "Cannot parse the host list"),
        ("a[1,b[2-3]]", "brackets that are not nested"),
        ("node[5-3]", r"Cannot parse the range '5-3' in the host list 'node\[5-3\]'"),
        ("node[a-b]", "Cannot parse the range 'a-b'"),
        ("node[]", "Cannot parse the range ''"),
        ("node[1,]", "Cannot parse the range ''"),
        ("n[1-70000]", "'1-70000' expands to 70000 hosts; at most 65536 are allowed"),
        ("n[1-999]m[1-999]", "expands to 998001 hosts"),
    ],
)
def test_a_list_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        expand_hostlist(text)


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
