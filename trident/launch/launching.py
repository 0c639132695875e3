"""The flags of the launcher; checks the run, then prints its commands or runs them."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType

from megatron import log
from megatron.config import NO_PROGRAM, ConfigSection, PathUse, Program, flag, parse
from megatron.config.elastic import fit_layout
from megatron.config.rules.checking import world_problems
from megatron.errors import ConfigError, ExitCode
from megatron.secret_text import masked
from trident.launch.hostfile import Host, named_hosts, read_hostfile
from trident.launch.node import Node, rank_commands, run_node
from trident.launch.plan import Plan, choose_devices, choose_hosts, passed_environment, slurm_hosts
from trident.launch.remote import exec_srun, free_port, run_by_ssh
from trident.launch.supervise import GracePeriods


@dataclass(frozen=True)
class LaunchRequest(ConfigSection):
    """The flags of `tools/launch.py`; the program follows `--`."""

    nodes: int | None = flag(
        None, "number of nodes; default: all hosts of the host file or the Slurm job, else 1", at_least=1
    )
    devices_per_node: int | None = flag(
        None, "ranks per node; default: the slots of the host file or the tasks of the Slurm job, else 1", at_least=1
    )
    local: bool = flag(False, "start the ranks of one node on this machine; the default")
    ssh: str | None = flag(
        None,
        "host file (`host slots=8`, `host:8` or `host` per line); hosts are reached by ssh",
        path=PathUse.SMALL_FILE,
    )
    hosts: str | None = flag(None, "hosts in Slurm's notation, node[003-007,011], instead of a file")
    slurm: bool = flag(False, "use the nodes of the surrounding Slurm job, reached by srun")
    dry_run: bool = flag(False, "print the command of each node and start nothing")
    node_rank: int | None = flag(None, "rank of this node, from 0; default: SLURM_NODEID", at_least=0)
    master_address: str | None = flag(None, "name or address of the first node, reachable from all others")
    master_port: int | None = flag(None, "port on the first node; default: a free one", at_least=1, at_most=65_535)
    python: str = flag(sys.executable, "interpreter on every host")
    directory: str | None = flag(None, "working directory on every host; default: the current one", path=PathUse.FOLDER)
    env: tuple[str, ...] = flag(
        (), "additional variables for hosts reached by ssh, as NAME (with its local value) or NAME=VALUE", nargs="+"
    )
    settle_seconds: float = flag(10.0, "time for the other ranks to exit by themselves after a failure", at_least=0)
    grace_seconds: float = flag(30.0, "time between SIGTERM and SIGKILL", at_least=0)
    skip_check: bool = flag(False, "start without checking the program's flags and layout")
    follow_input: bool = flag(False, "terminate the ranks at the end of standard input; set for hosts reached by ssh")

    def problems(self) -> Iterator[str]:
        targets = {"--local": self.local, "--slurm": self.slurm, "--ssh": self.ssh is not None}
        given = [name for name, is_given in targets.items() if is_given]
        if self.hosts is not None and (self.local or self.ssh is not None):
            given.append("--hosts")
        if len(given) > 1:
            yield f"{' and '.join(given)} cannot be combined: each sets where the ranks run. Give one."
        if self.node_rank is not None and self.node_rank >= (self.nodes or 1):
            yield (
                f"--node-rank {self.node_rank} is not among {self.nodes or 1} nodes (--nodes). The first is 0 and the "
                f"last {(self.nodes or 1) - 1}."
            )


_PORT = 29500  # torch's default; shown by --dry-run, which looks for no free port


# Programs with the trainer's command line, and the settings that each fixes.
_TRAINERS: Mapping[str, Program] = MappingProxyType(
    {"pretrain_gpt.py": NO_PROGRAM, "pretrain_prefix_lm.py": Program(fixed={"loss.objective": "prefix"})}
)


def launch(request: LaunchRequest, program: Sequence[str], launcher: str) -> int:
    """Runs a program on the requested hosts, or prints the commands.

    Args:
        program: its path and its flags.
        launcher: the path of `tools/launch.py` on every host.

    Returns:
        the exit code of the run.

    Raises:
        ConfigError: invalid flags of the launcher or the program; all problems at once.
        LaunchError: the layout does not fit, hosts are missing, or a process cannot be started.
    """
    if not program:
        raise ConfigError("no program given. Put it after --, for example: -- pretrain_gpt.py --num-layers 24 ...")
    if request.slurm or request.ssh is not None or request.hosts is not None:
        return _run_on_hosts(request, program, launcher)
    return _run_here(request, program)


def check_program(command: Sequence[str], world_size: int) -> list[str]:
    """Checks the flags and the layout of a trainer as it would itself; other programs are not checked.

    Args:
        command: the program and its flags.

    Returns:
        notices for the user.

    Raises:
        ConfigError: all problems at once.
    """
    program = PurePath(command[0]).name
    if program not in _TRAINERS:
        return [f"{program} is not checked before it starts: its flags are unknown here"]
    request = parse(command[1:], prog=program, program=_TRAINERS[program])
    request, notices = fit_layout(request, world_size)
    problems = world_problems(request, world_size)
    if problems:
        raise ConfigError(problems)
    parallel = request.parallel
    tp, pp, sequence = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.sequence_size,
    )
    sequence_text = f" x {sequence} of a sequence" if sequence > 1 else ""
    data = world_size // parallel.replica_size
    return [*notices, f"{world_size} ranks: {tp} tensor{sequence_text} x {pp} pipeline x {data} data"]


def _run_here(request: LaunchRequest, program: Sequence[str]) -> int:
    nodes, devices = request.nodes or 1, request.devices_per_node or 1
    _check(request, program, nodes * devices)
    port = request.master_port
    if nodes > 1 and request.dry_run and request.node_rank is None and request.master_address is None:
        return _show_nodes(request, program, nodes, devices)
    if nodes > 1 and (request.master_address is None or port is None):
        raise ConfigError(
            f"--local with --nodes {nodes} requires --master-address and --master-port of the first node, the same on "
            f"every node. Give them, or start all nodes from one host with --ssh or --slurm."
        )
    if port is None:
        port = _PORT if request.dry_run else _free_port_here()
    node = Node(_node_rank(request, nodes), nodes, devices, request.master_address or "127.0.0.1", port)
    command = [request.python, "-u", *program]
    if request.dry_run:
        for text in rank_commands(node, command):
            log.line(masked(text))
        return ExitCode.DONE
    if request.directory is not None:
        os.chdir(request.directory)
    grace_periods = GracePeriods(request.settle_seconds, request.grace_seconds)
    return run_node(node, command, os.environ, grace_periods, sys.stdin if request.follow_input else None)


def _show_nodes(request: LaunchRequest, program: Sequence[str], nodes: int, devices: int) -> int:
    """Prints the command to enter on each node; their names are not known yet."""
    for index in range(nodes):
        flags = ["--nodes", str(nodes), "--devices-per-node", str(devices), "--node-rank", str(index)]
        master = ["--master-address", "FIRST_NODE", "--master-port", str(request.master_port or _PORT)]
        log.line(f"# node {index}: ranks {index * devices} to {(index + 1) * devices - 1}")
        log.line(masked(shlex.join(["python", "tools/launch.py", *flags, *master, "--", *program])))
    return ExitCode.DONE


def _run_on_hosts(request: LaunchRequest, program: Sequence[str], launcher: str) -> int:
    offered, source = _offered_hosts(request)
    hosts = choose_hosts(offered, request.nodes, source)
    # Each task of a Slurm job is a launcher: the number of tasks does not limit the ranks that a launcher starts.
    is_unlimited = request.slurm and request.devices_per_node is not None
    devices = choose_devices([] if is_unlimited else hosts, request.devices_per_node)
    environment = passed_environment(os.environ, request.env)
    _check(request, program, len(hosts) * devices)
    plan = Plan(
        hosts=hosts,
        devices=devices,
        launcher=launcher,
        python=request.python,
        folder=request.directory or os.getcwd(),
        program=tuple(program),
        environment=environment,
        master_address=request.master_address or hosts[0].address,
        master_port=request.master_port or _PORT,
        grace_periods=GracePeriods(request.settle_seconds, request.grace_seconds),
    )
    if request.dry_run:
        for text in _shown(plan, by_slurm=request.slurm):
            log.line(text)
        return ExitCode.DONE
    if request.master_port is None:
        port = free_port(plan.port_command(by_slurm=request.slurm), hosts[0].name)
        plan = dataclasses.replace(plan, master_port=port)
    if request.slurm:
        exec_srun(plan)
    return run_by_ssh(plan)


def _check(request: LaunchRequest, program: Sequence[str], world_size: int) -> None:
    for notice in () if request.skip_check else check_program(program, world_size):
        log.info(notice)


def _offered_hosts(request: LaunchRequest) -> tuple[list[Host], str]:
    """Returns the available hosts, and where they are listed."""
    if request.hosts is not None:
        return named_hosts(request.hosts), f"--hosts {request.hosts}"
    if request.ssh is not None:
        return read_hostfile(Path(request.ssh)), f"--ssh {request.ssh}"
    return slurm_hosts(os.environ), f"Slurm job {os.environ.get('SLURM_JOB_ID', '?')}"


def _node_rank(request: LaunchRequest, nodes: int) -> int:
    if request.node_rank is not None or nodes == 1:
        return request.node_rank or 0
    number = os.environ.get("SLURM_NODEID", "")
    if not number.isdigit() or int(number) >= nodes:
        raise ConfigError(
            f"--local with --nodes {nodes} requires --node-rank, from 0 to {nodes - 1}. (Under srun it is "
            f"SLURM_NODEID, which is {number!r}.)"
        )
    return int(number)


def _shown(plan: Plan, *, by_slurm: bool) -> Iterator[str]:
    if by_slurm:
        yield f"# {', '.join(host.name for host in plan.hosts)}"
        yield masked(shlex.join(plan.srun_command()))
        return
    for index, host in enumerate(plan.hosts):
        yield f"# {host.name}: ranks {index * plan.devices} to {(index + 1) * plan.devices - 1}"
        yield masked(shlex.join(plan.ssh_command(index)))


def _free_port_here() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
