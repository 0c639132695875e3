"""Open MPI's own mpirun, where it is installed: ranks meet, and do not outlive it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from megatron.parallel.processes import born_at
from tests.helpers.machines.cluster import REPOSITORY
from tests.helpers.ranks import LAUNCH_VARIABLES

# Forks would have other parents than mpirun's daemon: a process of its own for each rank.
PROGRAM = """
import os, time, torch
from megatron.config import ParallelRequest
from megatron.parallel import messages
from megatron.parallel.joining import open_mesh
mesh = open_mesh(ParallelRequest())
total = int(messages.all_reduce_sum(torch.tensor([mesh.world.rank + 1]), mesh.world))
os.write(1, f"MET {mesh.world.rank} {mesh.world.size} {total} {mesh.local_rank} {os.getpid()}\\n".encode())
time.sleep(600)
"""


def command() -> list[str]:
    """What starts two ranks."""
    path = shutil.which("mpirun")
    if path is None:
        pytest.skip("needs mpirun (apt-get install openmpi-bin)")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    is_open_mpi = "Open MPI" in version or "OpenRTE" in version
    root = ["--allow-run-as-root"] if is_open_mpi and os.geteuid() == 0 else []
    return [path, *root, *(["--oversubscribe"] if is_open_mpi else []), "-n", "2", sys.executable, "-c", PROGRAM]


def test_ranks_meet_and_end_with_mpirun() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    environment.update(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    process = subprocess.Popen(
        command(), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    text, found = "", []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            text += line
            found = sorted(re.findall(r"MET (\d) (\d) (\d) (\d) (\d+)", text))
            if len(found) == 2:
                break
        assert [one[:4] for one in found] == [("0", "2", "3", "0"), ("1", "2", "3", "1")], text
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=120)
    deadline = time.monotonic() + 120
    while any(born_at(int(one[4])) for one in found):
        assert time.monotonic() < deadline, f"ranks live on: {found}"
        time.sleep(0.05)
