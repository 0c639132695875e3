"""What a process that may be a rank does first, before its flags are read and before its slow imports.

Imports neither torch nor anything that does. A rank does not outlive the launcher that started it.
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
# Words in a launcher's command line. They distinguish a launcher that is process 1 of a container from an init process
# that adopted the rank.
_LAUNCHER_WORDS = ("torch", "deepspeed", "launch.py", "mpi", "orte", "prte", "hydra", "pmi_proxy", "slurm", "srun")
# Processes besides process 1 that adopt a child whose parent has ended.
_ADOPTERS = ("systemd", "init", "tini", "dumb-init", "catatonit", "containerd-shim", "docker-init")


def begin_rank() -> None:
    """Ties this process to its launcher, gives the log its rank, and has the log keep warnings for its file.

    Errors that end it are also written where torchrun looks for them, so that torchrun's report ends with the error of
    the rank that failed first.

    Raises:
        PeerLostError: the launcher has ended already.
    """
    log.keep_warnings()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        process_exit.on_failure(functools.partial(write_error_file, Path(error_file)), only_if_shown=True)
    # What is wrong with the launcher's variables is reported together with what is wrong with the flags.
    with contextlib.suppress(LaunchError):
        ranks = launched_ranks()
        log.set_rank(ranks.rank, ranks.world_size)
        if ranks.has_parent_launcher:
            die_with_launcher()


def launched_ranks(local_rank: int | None = None) -> Ranks:
    """This process's rank and the number of ranks, by the launcher's variables; needs no contact with the others.

    Args:
        local_rank: the value of `--local_rank`.

    Raises:
        LaunchError: the variables contradict each other.
    """
    return discover_ranks(os.environ, local_rank=local_rank, parent_process_id=os.getppid())


def write_error_file(path: Path, code: int, text: str) -> bool:
    """Writes an error in the form in which torchrun reads its ranks' errors; False, since it is shown here too.

    Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py, `record_exception`.
    """
    report = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(report))
    return False


def die_with_launcher() -> None:
    """Asks Linux to kill this process when the one that started it ends; elsewhere does nothing.

    Without it the ranks of a launcher that was killed by SIGKILL keep running and writing. Calling it again is
    harmless.

    Raises:
        PeerLostError: the launcher has ended already.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or _is_adopter(parent):
        raise PeerLostError(
            f"The launcher of this rank ended before the rank was ready (its parent process was {parent} and is now "
            f"{os.getppid()}). Start the job again."
        )


def die_with_deepspeed_runner() -> None:
    """Does the same for the `deepspeed` command, whose child process starts the ranks of this node.

    A thread waits for the command to end. On nodes reached through ssh there is no process to wait for.
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
    threading.Thread(target=_die_after, args=(handle,), name="deepspeed-runner", daemon=True).start()


def _die_after(handle: int) -> None:
    select.select([handle], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _is_adopter(process: int) -> bool:
    """Whether a process is one that adopts orphans, and no launcher."""
    try:
        name = Path(f"/proc/{process}/comm").read_text().strip()
        text = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").lower()
    except OSError:
        return False  # not readable by this user: assume a launcher
    adopts = process == 1 or name.startswith(_ADOPTERS)
    return adopts and not any(word in text for word in _LAUNCHER_WORDS)
