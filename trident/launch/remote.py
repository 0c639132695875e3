"""Runs a plan on other hosts, with `ssh` or `srun`."""

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
    """Runs a command that prints a free port of a host.

    Raises:
        LaunchError: the command fails or prints no port.
    """
    try:
        done = subprocess.run(
            list(command), capture_output=True, timeout=_PORT_SECONDS, check=False, stdin=subprocess.DEVNULL, text=True
        )
        errors, output = done.stderr.strip(), done.stdout.split()
    except OSError as failure:
        errors, output = f"{command[0]} cannot be started: {failure.strerror}", []
    except subprocess.TimeoutExpired:
        errors, output = f"no answer within {_PORT_SECONDS:.0f} s", []
    if not output or not output[-1].isdigit():
        reason = errors.splitlines()[-1] if errors else "it printed no number"
        raise LaunchError(
            f"no free port found on {host}: {reason}. Check that `{command[0]}` reaches it without a password and that "
            f"--python names an interpreter there, or give --master-port."
        )
    return int(output[-1])


def run_by_ssh(plan: Plan) -> int:
    """Starts the launcher of every node over its own connection and waits for all.

    Returns:
        the exit code of the run.

    Raises:
        LaunchError: `ssh` is not installed, or no host reported an exit code.
    """
    children: list[Child] = []
    try:
        for index, host in enumerate(plan.hosts):
            process = subprocess.Popen(plan.ssh_command(index), stdin=subprocess.PIPE, start_new_session=True)
            children.append(Child(host.name, process, functools.partial(_send_name, process)))
    except OSError as failure:
        raise LaunchError(f"ssh cannot be started: {failure.strerror}. Install an ssh client.") from failure
    # The launchers there give their ranks the same periods; they get longer before their connection is closed.
    periods = dataclasses.replace(plan.grace_periods, grace_seconds=2 * plan.grace_periods.grace_seconds)
    code = Supervisor(periods).run(children)
    if code == _SSH_FAILED:
        failed = [child.name for child in children if child.process.returncode == _SSH_FAILED]
        raise LaunchError(
            f"ssh failed for {', '.join(failed)}; its message is above. Check that `ssh {failed[0]}` works without a "
            f"password."
        )
    return code


def exec_srun(plan: Plan) -> NoReturn:
    """Replaces this process with `srun`, which then receives the signals and sets the exit code.

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
    """Sends the name of a signal to the launcher at the other end; closes the connection for SIGKILL."""
    if process.stdin is None:
        return
    with contextlib.suppress(OSError, ValueError):  # it is closed, or the connection is gone
        if number == signal.SIGKILL:
            process.kill()
            process.stdin.close()
        else:
            process.stdin.write(f"{number.name}\n".encode())
            process.stdin.flush()
