"""The commands that start a run: one for each node, or one `srun` for all."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.errors import ConfigError, LaunchError
from megatron.slurm import find_slurm_job
from trident.launch.hostfile import Host
from trident.launch.supervise import GracePeriods

# Variables that configure Python, torch, communication libraries and the packages of the project.
# CUDA_VISIBLE_DEVICES is excluded: it is specific to a machine.
_PASSED = re.compile(
    "(?:PYTHON|NCCL_|GLOO_|TORCH_|TORCHINDUCTOR_|UCX_|FI_|OMP_|MKL_|DS_|HF_|CUDA_DEVICE_|TOKENIZERS_).*|LD_LIBRARY_PATH"
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:=(.*))?", re.DOTALL)
_STRAGGLER_SECONDS = 120  # Slurm terminates the other nodes this long after the first has exited
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=20")


@dataclass(frozen=True)
class Plan:
    """The hosts of a run and the commands that start its ranks on them.

    Attributes:
        hosts: the nodes; rank 0 runs on the first.
        devices: ranks per node.
        launcher: path of tools/launch.py on every host.
        python: interpreter on every host.
        folder: working directory on every host.
        program: its path and its flags.
        environment: variables set on every host.
    """

    hosts: tuple[Host, ...]
    devices: int
    launcher: str
    python: str
    folder: str
    program: tuple[str, ...]
    environment: Mapping[str, str]
    master_address: str
    master_port: int
    grace_periods: GracePeriods = field(default_factory=GracePeriods)

    def node_command(self, index: int | None) -> list[str]:
        """The launcher's command line on a node.

        Args:
            index: the node rank; None under `srun`, which sets it for each node.
        """
        node_rank = [] if index is None else ["--node-rank", str(index)]
        return [
            self.python, "-u", self.launcher, "--local", "--nodes", str(len(self.hosts)), *node_rank,
            "--devices-per-node", str(self.devices), "--master-address", self.master_address,
            "--master-port", str(self.master_port), "--settle-seconds", f"{self.grace_periods.settle_seconds:g}",
            "--grace-seconds", f"{self.grace_periods.grace_seconds:g}", "--skip-check",
        ]  # fmt: skip

    def ssh_command(self, index: int) -> list[str]:
        """The `ssh` command that starts the ranks of a node; its last argument is a command of the host's shell."""
        settings = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        # --follow-input: the launcher there terminates its ranks when the connection is lost.
        remote = ["exec", "env", *settings, *self.node_command(index), "--follow-input", "--", *self.program]
        return [*_SSH, "--", self.hosts[index].name, f"cd {shlex.quote(self.folder)} && {shlex.join(remote)}"]

    def srun_command(self) -> list[str]:
        """The `srun` command that starts a launcher on every node of a Slurm job, with all of the job's processors."""
        # Launchers terminate their ranks themselves: --kill-on-bad-exit would kill them before they report how.
        names = ",".join(host.name for host in self.hosts)
        return [
            *_srun(len(self.hosts), names), "--export=ALL", "--cpu-bind=none", f"--chdir={self.folder}",
            f"--wait={_STRAGGLER_SECONDS}", "--kill-on-bad-exit=0", *self.node_command(None), "--", *self.program,
        ]  # fmt: skip

    def port_command(self, *, by_slurm: bool) -> list[str]:
        """A command that prints a free port of the first host."""
        command = [self.python, "-c", FREE_PORT]
        if by_slurm:
            return [*_srun(1, self.hosts[0].name), "--overlap", *command]
        return [*_SSH, "--", self.hosts[0].name, shlex.join(command)]


FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"


def passed_environment(environ: Mapping[str, str], requested: Sequence[str] = ()) -> dict[str, str]:
    """The variables set on every host: the settings of the run's libraries, and the requested ones.

    Args:
        requested: NAME, with its value in this process, or NAME=VALUE.

    Raises:
        ConfigError: an invalid name, or a variable that is not set here; all problems at once.
    """
    # Names that suggest a secret must be requested: every user of the host can see the arguments of a command.
    passed = {
        name: value for name, value in environ.items() if _PASSED.fullmatch(name) and not _SECRET.search(name.upper())
    }
    problems = []
    for text in requested:
        match = _ASSIGNMENT.fullmatch(text)
        if match is None:
            problems.append(f"--env {text} is not a variable. It must look like NAME or NAME=VALUE.")
        elif match[2] is None and match[1] not in environ:
            problems.append(f"--env {text}: {text} is not set here. Set it, or give --env {text}=VALUE.")
        else:
            passed[match[1]] = environ[match[1]] if match[2] is None else match[2]
    if problems:
        raise ConfigError(problems)
    return passed


def choose_hosts(hosts: Sequence[Host], nodes: int | None, source: str) -> tuple[Host, ...]:
    """The first `nodes` hosts, or all.

    Raises:
        LaunchError: fewer hosts are listed.
    """
    if nodes is not None and nodes > len(hosts):
        shown = ", ".join(host.name for host in hosts[:8]) + (", ..." if len(hosts) > 8 else "")
        raise LaunchError(
            f"--nodes {nodes} requires {nodes} hosts, and {source} names {len(hosts)} ({shown}). Use --nodes "
            f"{len(hosts)}, or add hosts."
        )
    return tuple(hosts[:nodes])


def choose_devices(hosts: Sequence[Host], devices: int | None) -> int:
    """Ranks per node: the requested number, else the slots of every host, else 1.

    Raises:
        LaunchError: a host has fewer slots, or hosts differ and no number was requested.
    """
    offered = {host.name: host.slots for host in hosts if host.slots is not None}
    if devices is None:
        counts = sorted(set(offered.values()))
        if len(counts) > 1:
            shown = ", ".join(f"{name} {count}" for name, count in list(offered.items())[:8])
            raise LaunchError(
                f"The hosts have different numbers of slots ({shown}), and every node must run the same number of "
                f"ranks. Give --devices-per-node {counts[0]}, or remove hosts."
            )
        return counts[0] if counts else 1
    for name, count in offered.items():
        if count < devices:
            raise LaunchError(
                f"--devices-per-node {devices} is more than the {count} slots of {name}. Use {count}, or correct the "
                f"host file."
            )
    return devices


def slurm_hosts(environ: Mapping[str, str]) -> list[Host]:
    """The nodes of the surrounding Slurm job, with its tasks per node as slots.

    Raises:
        LaunchError: no job surrounds this process, or its variables are invalid.
    """
    job = find_slurm_job(environ)
    if job is None:
        raise LaunchError(
            "--slurm requires a surrounding Slurm job, and SLURM_JOB_NODELIST is not set. Submit a batch script "
            "(sbatch examples/slurm/pretrain.slurm), or run it inside salloc; --dry-run with --hosts shows the command "
            "without a job."
        )
    return [Host(name, job.tasks_per_node) for name in job.hosts]


def _srun(nodes: int, names: str) -> list[str]:
    return ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--nodelist={names}"]
