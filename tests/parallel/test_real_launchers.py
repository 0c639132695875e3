"""The schedulers' own srun and mpirun, where they are installed: ranks meet, and do not outlive the job."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# Prints instead of writing files: the nodes of a cluster may not share a temporary folder.
PROGRAM = """
import os, socket, sys, time
import torch
from megatron.config import ParallelRequest
from megatron.parallel import messages
from megatron.parallel.joining import close_mesh, open_mesh

mesh = open_mesh(ParallelRequest())
total = int(messages.all_reduce_sum(torch.tensor([mesh.world.rank + 1]), mesh.world))
facts = (mesh.world.rank, mesh.world.size, total, mesh.local_rank, os.getpid(), socket.gethostname())
print("\\nFACTS", *facts, os.environ.get("SLURM_JOB_ID", "-"), flush=True)
time.sleep(float(sys.argv[1]))
close_mesh(mesh)
"""
_FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


def _idle_nodes() -> int:
    """Nodes that Slurm would give us now; 0 without Slurm, or where no controller answers."""
    if shutil.which("srun") is None or shutil.which("sinfo") is None:
        return 0
    try:
        answer = subprocess.run(
            ["sinfo", "-h", "-t", "idle,mixed", "-o", "%D"], capture_output=True, text=True, timeout=5, check=False
        )
    except subprocess.TimeoutExpired:
        return 0
    return sum(int(word) for word in answer.stdout.split()) if answer.returncode == 0 else 0


@pytest.fixture(scope="module")
def idle_nodes() -> int:
    found = _idle_nodes()
    if found == 0:
        pytest.skip("needs srun and a Slurm controller that answers, with an idle node")
    return found


@pytest.fixture
def mpirun() -> list[str]:
    path = shutil.which("mpirun")
    if path is None:
        pytest.skip("needs mpirun")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    if "Open MPI" not in version and "OpenRTE" not in version:
        return [path]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [path, *root, "--oversubscribe"]


def _start(command: list[str], seconds: float) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    environment.update(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    return subprocess.Popen(
        [*command, sys.executable, "-c", PROGRAM, str(seconds)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _srun(nodes: int, ranks: int) -> list[str]:
    return ["srun", f"--nodes={nodes}", f"--ntasks={ranks}", "--time=1", "--immediate=5", "--job-name=launch-test"]


def _facts(text: str) -> list[list[str]]:
    return sorted(line.split()[1:] for line in re.findall(r"FACTS \d.*", text))


def _wait_for_facts(process: subprocess.Popen[str], ranks: int) -> list[list[str]]:
    """Reads until all ranks have met; skips where the cluster has become busy."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if len(_facts(text)) == ranks:
            return _facts(text)
    if "Unable to allocate resources" in text:
        pytest.skip("the cluster is busy")
    pytest.fail(f"the launcher ended: {text}")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _check_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"ranks live on: {pids}"
        time.sleep(0.05)


def test_srun_and_scancel(idle_nodes: int) -> None:
    nodes = min(idle_nodes, 2)
    process = _start(_srun(nodes, 2), 60)
    try:
        facts = _wait_for_facts(process, 2)
        assert [fact[:4] for fact in facts] == [["0", "2", "3", "0"], ["1", "2", "3", str(2 - nodes)]]
        subprocess.run(["scancel", facts[0][6]], check=True, timeout=10)
        process.communicate(timeout=60)
        assert process.returncode != 0
        if all(fact[5] == socket.gethostname() for fact in facts):
            _check_gone([int(fact[4]) for fact in facts])
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_mpirun_and_its_termination(mpirun: list[str]) -> None:
    process = _start([*mpirun, "-n", "2"], 60)
    try:
        facts = _wait_for_facts(process, 2)
        assert [fact[:4] for fact in facts] == [["0", "2", "3", "0"], ["1", "2", "3", "1"]]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    _check_gone([int(fact[4]) for fact in facts])
