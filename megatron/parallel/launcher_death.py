"""Ranks do not outlive the launcher that started them.

Imports neither torch nor anything that does, so that an entry point can call it before its slow imports.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from pathlib import Path

from megatron.errors import PeerLostError

_PR_SET_PDEATHSIG = 1  # prctl(2)
# Words in a launcher's command line. They distinguish a launcher that is process 1 of a container from an init process
# that adopted the rank.
_LAUNCHER_WORDS = ("torch", "deepspeed", "launch.py", "mpi", "orte", "prte", "hydra", "pmi_proxy", "slurm", "srun")
# Processes besides process 1 that adopt a child whose parent has ended.
_ADOPTERS = ("systemd", "init", "tini", "dumb-init", "catatonit", "containerd-shim", "docker-init")


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
