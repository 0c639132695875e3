"""A real Slurm: jobs that are preempted and requeued, arrays, exit codes, and host lists as Slurm reads them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.errors import LaunchError
from megatron.observe.metrics_file import read_steps
from megatron.slurm import expand_hostlist
from tests.helpers.machines.cluster import HOSTS, Cluster
from tests.helpers.tiny_run import TinyCorpus

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.slow]

LISTS = """
    node[003-007,011] node1 n[1-2,05] n[0-0,00] n[009-11] n[8-11] n[08-11] n[98-101] n[1-3,5-7,9],m2,k[1-2] a,b,a
    r[0-1]n[1-2] r[0-1]n[1-2]g[0-1] a[0-1]b[0-1]c[0-1]d[0-1] n[1-2][3-4] a[1-2]b[3] [1-3] [01-03],x a,,b ,a a, n-1
    n[001-3] gpu-a[01-02],gpu-b[1-2],login
"""
REFUSED = "n[3-1] n[a-b] n[] n[1-3:2] n[1,,2] n[1-2,] n[-2] a[1,b[2-3]] n[1-70000]"
ENDING = """
import os, sys
sys.stdout.write("RANK {RANK} {LOCAL_RANK} {MASTER_ADDR}\\n".format(**os.environ))
sys.exit(77 if os.environ["RANK"] == "3" else 75)
"""
MEETING = """
import os, socket, torch
from megatron.config import ParallelRequest
from megatron.parallel import messages
from megatron.parallel.joining import close_mesh, open_mesh
mesh = open_mesh(ParallelRequest())
total = int(messages.all_reduce_sum(torch.tensor([mesh.world.rank + 1]), mesh.world))
print(f"MET {mesh.world.rank} {mesh.world.size} {total} {mesh.local_rank} {socket.gethostname()}", flush=True)
close_mesh(mesh)
"""


def wait_until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 300  # a requeued job alone waits for two minutes
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "waited too long"
        time.sleep(0.05)


def last_step(folder: Path) -> int:
    return max(read_steps(folder), default=0) if (folder / "metrics.jsonl").exists() else 0


def test_host_lists_are_read_as_by_slurm(slurm: Cluster) -> None:
    script = "; ".join(
        f"echo '= {one}'; scontrol show hostnames '{one}' 2>/dev/null" for one in f"{LISTS} {REFUSED}".split()
    )
    answers = {
        block.split("\n", 1)[0]: block.split()[1:] for block in slurm.output(script).split("= ") if block.strip()
    }
    for one in LISTS.split():
        assert expand_hostlist(one) == answers[one], one
    for one in REFUSED.split():
        assert answers[one] == [], one
        with pytest.raises(LaunchError):
            expand_hostlist(one)


def test_ranks_meet_and_exit_codes_reach_the_caller(slurm: Cluster, project: Path) -> None:
    (project / "ending.py").write_text(ENDING)
    launch = "python tools/launch.py --slurm --devices-per-node 2 --settle-seconds 5 -- ending.py"
    job = slurm.output(f"sbatch --parsable --nodes=2 --ntasks-per-node=1 --output=ending.log --wrap '{launch}'").strip()
    ended = slurm.wait_for_job(job, "COMPLETED", "FAILED", "CANCELLED")
    output = (project / "ending.log").read_text()
    assert ended["ExitCode"] == "77:0", output
    expected = [f"RANK {rank} {rank % 2} {HOSTS[0]}" for rank in range(4)]
    assert sorted(re.findall(rf"RANK \d \d {HOSTS[0]}", output)) == expected

    (project / "meeting.py").write_text(MEETING)
    code, output = slurm.run("head", ["srun", "--nodes=2", "--ntasks-per-node=1", slurm.python, "meeting.py"])
    assert code == 0 and sorted(re.findall(r"MET \d \d \d \d node\d+", output)) == [
        f"MET {rank} 2 3 0 {HOSTS[rank]}" for rank in (0, 1)
    ]


@pytest.mark.full
def test_a_preempted_job_saves_is_requeued_and_goes_on(slurm: Cluster, project: Path, corpus: TinyCorpus) -> None:
    variables = {
        "SCALE": "tiny", "DEVICES_PER_NODE": "1", "DATA_PATH": corpus.prefix, "VOCAB_FILE": corpus.vocab_file,
        "MERGE_FILE": corpus.merge_file, "CHECKPOINT_PATH": str(project / "saved"), "SBATCH_GPUS_PER_NODE": "0",
    }  # fmt: skip
    flags = "--train-iters 100000 --log-interval 1 --run-dir run --kill-switch-path stop --eval-iters 0"
    submitted = slurm.output(f"sbatch --parsable --output=job.log examples/slurm/pretrain.slurm {flags}", **variables)
    job, log, run = submitted.strip(), project / "job.log", project / "run"
    assert job.isdigit(), submitted
    wait_until(lambda: last_step(run) >= 3, log)

    urgent = slurm.output("sbatch --parsable --partition=urgent --nodes=2 --output=urgent.log --wrap 'srun hostname'")
    slurm.wait_for_job(urgent.strip(), "COMPLETED")
    assert sorted((project / "urgent.log").read_text().split()) == sorted(HOSTS)
    output = log.read_text()
    assert "SIGTERM" in output and f"resumable (code 75): requeueing job {job}" in output, output
    saved = max(int(path.name.removeprefix("iter_")) for path in (project / "saved").glob("iter_*"))
    assert saved == last_step(run) >= 3, "no step is lost"

    def goes_on() -> bool:
        # Two minutes after its last processes have ended Slurm starts it by itself; asking before that has no effect.
        slurm.output(f"scontrol update JobId={job} StartTime=now || true; sleep 1")
        return last_step(run) > saved

    time.sleep(2)  # in the second in which it was requeued Slurm takes a start for the former one, and ends the job
    wait_until(goes_on, log)
    (project / "stop").touch()
    ended = slurm.wait_for_job(job, "COMPLETED", "FAILED", "CANCELLED")
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), log.read_text()
    assert sorted(read_steps(run)) == list(range(1, last_step(run) + 1)), "every step once"


def test_an_array_of_jobs_preprocesses_and_another_merges(slurm: Cluster, project: Path, corpus: TinyCorpus) -> None:
    documents = [f'{{"text": "document {number} of the corpus, {"word " * (number % 7)}"}}' for number in range(200)]
    (project / "corpus.jsonl").write_text("\n".join(documents) + "\n")
    variables = {
        "VOCAB_FILE": corpus.vocab_file,
        "MERGE_FILE": corpus.merge_file,
        "OUTPUT_PREFIX": "joined",
        "SHARDS": "2",
    }
    script = (
        "array=$(sbatch --parsable --array=1-2 --cpus-per-task=1 examples/slurm/preprocess.slurm) && "
        "sbatch --parsable --dependency=afterok:$array examples/slurm/merge_shards.slurm"
    )
    job = slurm.output(script, **variables).strip()
    whole = {**variables, "OUTPUT_PREFIX": "whole", "SHARDS": "1"}
    code, output = slurm.run("node003", ["bash", "examples/slurm/preprocess.slurm"], **whole)
    assert code == 0, output
    ended = slurm.wait_for_job(job, "COMPLETED", "FAILED", "CANCELLED")
    assert ended["JobState"] == "COMPLETED", "".join(path.read_text() for path in project.glob("*.log"))
    for ending in (".bin", ".idx"):
        (alone,) = project.glob(f"whole*{ending}")
        assert (project / f"joined_text_document{ending}").read_bytes() == alone.read_bytes()
