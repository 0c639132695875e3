"""First steps of a process that may be a rank, before it reads its flags and before slow imports.

Must not import torch, even indirectly. A rank does not outlive the launcher that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from megatron import log, process_exit
from megatron.errors import LaunchError, PeerLostError
from megatron.parallel.launchers import Ranks, discover_ranks

_PR_SET_PDEATHSIG = 1  # prctl(2)
# Parts of a launcher's command line: process 1 of a container may be a launcher, or an init process that adopted the
# rank.
_LAUNCHER_MARKS = ("torch", "deepspeed", "launch.py", "mpi", "orte", "prte", "hydra", "pmi_proxy", "slurm", "srun")
# Processes other than process 1 that adopt orphans.
_ADOPTERS = ("systemd", "init", "tini", "dumb-init", "catatonit", "containerd-shim", "docker-init")


def begin_rank() -> None:
    """Binds this process to its launcher, sets the rank of the log, and has the log keep warnings for its file.

    A fatal error is also written to torchrun's error file, so that torchrun's report ends with the error of the rank
    that failed first.

    Raises:
        PeerLostError: the launcher has already exited.
    """
    log.keep_warnings()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        process_exit.on_failure(functools.partial(write_error_file, Path(error_file)), only_if_shown=True)
    # Problems of the launcher's variables are reported later, together with problems of flags.
    with contextlib.suppress(LaunchError):
        ranks = launched_ranks()
        log.set_rank(ranks.rank, ranks.world_size)
        if ranks.has_parent_launcher:
            bind_to_launcher()


def launched_ranks(local_rank: int | None = None) -> Ranks:
    """This process's rank and the world size, from the launcher's variables, without communication.

    Args:
        local_rank: the value of `--local_rank`.

    Raises:
        LaunchError: the variables contradict each other.
    """
    return discover_ranks(os.environ, local_rank=local_rank, parent_process_id=os.getppid())


def write_error_file(path: Path, code: int, text: str) -> bool:
    """Writes an error to torchrun's error file; returns False, as the error must still be shown.

    Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py, `record_exception`.
    """
    report = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(report))
    return False


def bind_to_launcher() -> None:
    """Has Linux kill this process when its parent exits; no effect on other systems. Idempotent.

    Otherwise the ranks of a launcher that received SIGKILL would keep running and writing.

    Raises:
        PeerLostError: the launcher has already exited.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or _is_adopter(parent):
        raise PeerLostError(
            f"The launcher of this rank exited before the rank was ready (its parent process was {parent} and is now "
            f"{os.getppid()}). Start the job again."
        )


def bind_to_deepspeed_runner() -> None:
    """Does the same for the `deepspeed` command, whose child process starts the ranks of this node.

    A thread waits for the command to exit. Nodes that are reached by ssh have no such process.
    """
    if not hasattr(os, "pidfd_open"):
        return
    try:
        runner = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        if b"deepspeed" not in Path(f"/proc/{runner}/cmdline").read_bytes():
            return
        handle = os.pidfd_open(runner)
    except (OSError, ValueError, IndexError):
        return
    threading.Thread(target=_kill_after, args=(handle,), name="deepspeed-runner", daemon=True).start()


def _kill_after(handle: int) -> None:
    select.select([handle], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _is_adopter(process: int) -> bool:
    """Returns True if a process adopts orphans and is not a launcher."""
    try:
        name = Path(f"/proc/{process}/comm").read_text().strip()
        text = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").lower()
    except OSError:
        return False  # not readable by this user: assume a launcher
    adopts = process == 1 or name.startswith(_ADOPTERS)
    return adopts and not any(mark in text for mark in _LAUNCHER_MARKS)
