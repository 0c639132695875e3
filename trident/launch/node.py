"""Starts and supervises the ranks of one node."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron import log
from megatron.errors import LaunchError
from megatron.parallel.launchers import LAUNCH_VARIABLE
from trident.launch.supervise import Child, GracePeriods, Supervisor


@dataclass(frozen=True)
class Node:
    """One node's share of a run.

    Attributes:
        index: node rank; rank 0 runs on node 0.
        devices: ranks per node.
    """

    index: int
    nodes: int
    devices: int
    master_address: str
    master_port: int

    @property
    def ranks(self) -> range:
        return range(self.index * self.devices, (self.index + 1) * self.devices)

    def variables(self, local_rank: int) -> dict[str, str]:
        """Environment of a rank: torchrun's variables, and the one that names this launcher."""
        return {
            "RANK": str(self.ranks[local_rank]),
            "WORLD_SIZE": str(self.nodes * self.devices),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.devices),
            "GROUP_RANK": str(self.index),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            LAUNCH_VARIABLE: "1",
        }


def rank_commands(node: Node, command: Sequence[str]) -> list[str]:
    """Shell commands that start each rank of the node."""
    commands = []
    for local_rank in range(node.devices):
        settings = (f"{name}={value}" for name, value in node.variables(local_rank).items())
        commands.append(shlex.join(["env", *settings, *command]))
    return commands


def run_node(
    node: Node,
    command: Sequence[str],
    environ: Mapping[str, str],
    grace_periods: GracePeriods,
    control: Iterable[str] | None = None,
) -> int:
    """Runs a node's ranks to their end.

    Args:
        command: starts a rank.
        environ: the environment of this process.
        control: lines from the process that started this one, each the name of a signal to forward. At their end that
            process is gone, and the ranks are terminated.

    Returns:
        the exit code of the run.

    Raises:
        LaunchError: the command cannot be started.
    """
    threads = max(1, (os.cpu_count() or 1) // node.devices)
    shared = {"OMP_NUM_THREADS": str(threads), **environ}
    supervisor = Supervisor(grace_periods)
    children: list[Child] = []
    try:
        for local_rank, rank in enumerate(node.ranks):
            process = _start(command, {**shared, **node.variables(local_rank)})
            children.append(Child(f"rank {rank}", process, functools.partial(_signal_group, process)))
    except OSError as failure:
        for child in children:
            child.send(signal.SIGKILL)
        raise LaunchError(
            f"{command[0]} cannot be started: {failure.strerror}. Give --python the interpreter of the project's "
            f"environment on this host."
        ) from failure
    if control is not None:
        threading.Thread(target=_handle_signals, args=(control, supervisor), daemon=True).start()
    return supervisor.run(children)


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # In a new session, Ctrl-C reaches the launcher only, and the rank's children can be killed with it.
    return subprocess.Popen(list(command), env=dict(environ), stdin=subprocess.DEVNULL, start_new_session=True)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def _handle_signals(control: Iterable[str], supervisor: Supervisor) -> None:
    """Forwards the signals that lines name, and terminates all ranks at the end of the lines."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
        for line in control:
            number = getattr(signal, line.strip(), None)
            if isinstance(number, signal.Signals):
                supervisor.forward(number)
    log.debug("the process that started this launcher is gone")
    supervisor.terminate()
