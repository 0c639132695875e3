"""Real processes started in every way; and ranks that do not outlive their launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.parallel.processes import born_at
from tests.helpers.programs import forking_python
from tests.helpers.ranks import LAUNCH_VARIABLES, free_port

REPOSITORY = Path(__file__).parents[2]
# Joins the mesh, adds the ranks up, and writes the sum to its own file; then waits if requested.
PROGRAM = """
import sys, time
import torch
from megatron.config import ParallelRequest
from megatron.parallel import messages
from megatron.parallel.joining import close_mesh, open_mesh

folder, seconds = (word for word in sys.argv[1:] if not word.startswith("--"))
flag = next((int(word.partition("=")[2]) for word in sys.argv if word.startswith("--local")), None)
mesh = open_mesh(ParallelRequest(local_rank=flag))
total = int(messages.all_reduce_sum(torch.tensor([mesh.world.rank + 1]), mesh.world))
import os
with open(f"{folder}/rank{mesh.world.rank}.tmp", "w") as file:
    file.write(f"{mesh.world.size} {total} {mesh.local_rank} {os.getpid()}")
os.rename(f"{folder}/rank{mesh.world.rank}.tmp", f"{folder}/rank{mesh.world.rank}")
time.sleep(float(seconds))
close_mesh(mesh)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def _environment(**more: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    return {**environment, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **more}


def _start(command: list[str], **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=_environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _finish(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output


def _words(folder: Path, world_size: int) -> list[list[str]]:
    return [(folder / f"rank{rank}").read_text().split()[:3] for rank in range(world_size)]


def _python(program: Path, *more: str, python: str = "") -> list[str]:
    return [python or forking_python(), str(program), str(program.parent), "0", *more]


def test_plain_python_and_hand_set_variables(program: Path) -> None:
    inside_allocation = {
        "SLURM_JOB_ID": "5",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
        "SLURM_JOB_NODELIST": "no-such-host",
    }
    taken = {"MASTER_ADDR": "localhost", "MASTER_PORT": "9994", "RANK": "0", "LOCAL_RANK": "0"}
    for variables in (inside_allocation, taken):
        _finish([_start(_python(program), **variables)])
        assert _words(program.parent, 1) == [["1", "1", "0"]]
        (program.parent / "rank0").unlink()


def test_local_rank_flag(program: Path) -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    _finish([_start(_python(program, f"--local_rank={rank}"), **shared, RANK=str(rank)) for rank in (0, 1)])
    assert _words(program.parent, 2) == [["2", "3", "0"], ["2", "3", "1"]]


@pytest.mark.sampled(3)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only: PR_SET_PDEATHSIG")
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed node launcher", "deepspeed"])
def test_ranks_die_with_their_launcher(program: Path, launcher: str) -> None:
    tail = [str(program), str(program.parent), "600"]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    elif launcher == "deepspeed":
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", f"--master_port={free_port()}"]
    else:
        command = [sys.executable, "-m", "deepspeed.launcher.launch", "--world_info=eyJsb2NhbGhvc3QiOiBbMCwgMV19"]
        command += ["--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    process = _start([*command, *tail])
    try:
        files = [program.parent / f"rank{rank}" for rank in (0, 1)]
        _wait_for(lambda: all(file.exists() for file in files), 150, process)
        assert _words(program.parent, 2) == [["2", "3", "0"], ["2", "3", "1"]]
        pids = [int(file.read_text().split()[3]) for file in files]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    _wait_for(lambda: not any(map(born_at, pids)), 120)


def _wait_for(condition, seconds: float, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            pytest.fail(f"the launcher ended: {process.communicate()[0]}")
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
