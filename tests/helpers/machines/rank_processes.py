"""The ranks of a run as processes of their own, as a launcher without a supervisor would start them."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.programs import forking_python
from tests.helpers.ranks import free_port

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: its exit code (negative: the signal), when (`time.time()`), and what it printed to stderr."""

    code: int
    at: float
    errors: str


def run_rank_processes(
    words: Sequence[str],
    world_size: int,
    timeout_seconds: float = 90,
    meanwhile: Callable[[Sequence[subprocess.Popen[bytes]]], None] = lambda processes: None,
) -> list[RankEnd]:
    """Starts a Python program on every rank and waits for all of them; one that does not end is an error.

    Args:
        meanwhile: called with the processes, in rank order, when all have been started.
    """
    shared = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(world_size):
            errors = Path(folder, f"errors{rank}")
            with errors.open("w") as stream:
                process = subprocess.Popen(
                    [forking_python(), *words],
                    cwd=ROOT,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.DEVNULL,
                    stderr=stream,
                    start_new_session=True,
                )
            started.append((process, errors))
        processes = [process for process, _ in started]
        meanwhile(processes)
        ended_at = _wait(processes, timeout_seconds)
        ends = [
            RankEnd(process.returncode if process.returncode is not None else 0, at, errors.read_text())
            for (process, errors), at in zip(started, ended_at, strict=True)
        ]
    if any(at == float("inf") for at in ended_at):
        raise AssertionError("a rank did not end:\n" + "\n".join(f"rank {n}: {end}" for n, end in enumerate(ends)))
    return ends


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_seconds: float) -> list[float]:
    """When each process ended; infinity for one that had to be killed."""
    ended = [0.0] * len(processes)
    deadline = time.monotonic() + timeout_seconds
    while not all(ended):
        for number, process in enumerate(processes):
            if not ended[number] and process.poll() is not None:
                ended[number] = time.time()
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for number, process in enumerate(processes):
        if not ended[number]:
            ended[number] = float("inf")
            process.kill()
            process.wait()
    return ended
