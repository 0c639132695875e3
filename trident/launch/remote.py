"""Runs a plan on other hosts: through `ssh`, or through `srun`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import NoReturn

from megatron.errors import LaunchError
from trident.launch.plan import Plan
from trident.launch.supervise import Child, Supervisor

_SSH_FAILED = 255
_PORT_SECONDS = 60.0


def free_port(command: Sequence[str], host: str) -> int:
    """Asks a host for a port that is free there.

    Raises:
        LaunchError: the host cannot be asked.
    """
    try:
        done = subprocess.run(
            list(command), capture_output=True, timeout=_PORT_SECONDS, check=False, stdin=subprocess.DEVNULL, text=True
        )
        said, words = done.stderr.strip(), done.stdout.split()
    except OSError as failure:
        said, words = f"{command[0]} cannot be started: {failure.strerror}", []
    except subprocess.TimeoutExpired:
        said, words = f"no answer within {_PORT_SECONDS:.0f} s", []
    if not words or not words[-1].isdigit():
        reason = said.splitlines()[-1] if said else "it printed no number"
        raise LaunchError(
            f"{host} cannot be asked for a free port: {reason}. Check that `{command[0]}` reaches it without a "
            f"password and that --python names an interpreter there, or give --master-port."
        )
    return int(words[-1])


def run_by_ssh(plan: Plan) -> int:
    """Starts every node's launcher through a connection of its own and waits for all.

    Returns:
        the exit code of the run.

    Raises:
        LaunchError: `ssh` is not installed, or no host said how its ranks ended.
    """
    children: list[Child] = []
    try:
        for index, host in enumerate(plan.hosts):
            process = subprocess.Popen(plan.ssh_command(index), stdin=subprocess.PIPE, start_new_session=True)
            children.append(Child(host.name, process, functools.partial(_send_name, process)))
    except OSError as failure:
        raise LaunchError(f"ssh cannot be started: {failure.strerror}. Install an ssh client.") from failure
    # The launchers there have the same patience with their ranks; they are given more before the connection is cut.
    own = dataclasses.replace(plan.patience, grace_seconds=2 * plan.patience.grace_seconds)
    code = Supervisor(own).run(children)
    if code == _SSH_FAILED:
        failed = [child.name for child in children if child.process.returncode == _SSH_FAILED]
        raise LaunchError(
            f"ssh failed for {', '.join(failed)}; its message is above. Check that `ssh {failed[0]}` works without a "
            f"password."
        )
    return code


def become_srun(plan: Plan) -> NoReturn:
    """Replaces this process by `srun`, so that signals and the exit code are its own.

    Raises:
        LaunchError: it is not installed.
    """
    command = plan.srun_command()
    try:
        os.execvp(command[0], command)
    except OSError as failure:
        raise LaunchError(
            f"srun cannot be started: {failure.strerror}. Run this on a node where Slurm is installed."
        ) from failure


def _send_name(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Tells the launcher at the other end which signal to send; for SIGKILL cuts the connection."""
    if process.stdin is None:
        return
    with contextlib.suppress(OSError, ValueError):  # it is closed, or the connection is gone
        if number == signal.SIGKILL:
            process.kill()
            process.stdin.close()
        else:
            process.stdin.write(f"{number.name}\n".encode())
            process.stdin.flush()
