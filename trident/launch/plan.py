"""The commands that start a run: one for each node, or one `srun` for all."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.errors import ConfigError, LaunchError
from megatron.slurm import find_slurm_job
from trident.launch.hostfile import Host
from trident.launch.supervise import Patience

# Variables that steer Python, torch, its communication libraries and the packages of the project. CUDA_VISIBLE_DEVICES
# is not among them: it is one machine's.
_PASSED = re.compile(
    "(?:PYTHON|NCCL_|GLOO_|TORCH_|TORCHINDUCTOR_|UCX_|FI_|OMP_|MKL_|DS_|HF_|CUDA_DEVICE_|TOKENIZERS_).*|LD_LIBRARY_PATH"
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSWORD")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:=(.*))?", re.DOTALL)
_STRAGGLER_SECONDS = 120  # until Slurm ends the last nodes, after the first has ended
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=20")


@dataclass(frozen=True)
class Plan:
    """What runs where.

    Attributes:
        hosts: the nodes; rank 0 runs on the first.
        devices: ranks on every node.
        launcher: the path of tools/launch.py on every host.
        python: the interpreter on every host.
        folder: where the program runs on every host.
        words: the program and its flags.
        environment: variables that the hosts are given.
    """

    hosts: tuple[Host, ...]
    devices: int
    launcher: str
    python: str
    folder: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    master_address: str
    master_port: int
    patience: Patience = field(default_factory=Patience)

    def node_words(self, index: int | None) -> list[str]:
        """The words that start a node's ranks, on that node.

        Args:
            index: its place; None where `srun` tells each node its own.
        """
        place = [] if index is None else ["--node-rank", str(index)]
        return [
            self.python, "-u", self.launcher, "--local", "--nodes", str(len(self.hosts)), *place,
            "--devices-per-node", str(self.devices), "--master-address", self.master_address,
            "--master-port", str(self.master_port), "--settle-seconds", f"{self.patience.settle_seconds:g}",
            "--grace-seconds", f"{self.patience.grace_seconds:g}", "--skip-check",
        ]  # fmt: skip

    def ssh_command(self, index: int) -> list[str]:
        """What starts a node's ranks from here; the host's shell reads the last word.

        The launcher there ends its ranks when its standard input does, that is when the connection is gone.
        """
        settings = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        words = ["exec", "env", *settings, *self.node_words(index), "--follow-input", "--", *self.words]
        return [*_SSH, "--", self.hosts[index].name, f"cd {shlex.quote(self.folder)} && {shlex.join(words)}"]

    def srun_command(self) -> list[str]:
        """What starts a launcher on every node of a Slurm job; it has all processors that the job has there.

        The launchers end their ranks themselves. With --kill-on-bad-exit Slurm would kill them before they have said
        how their ranks ended.
        """
        names = ",".join(host.name for host in self.hosts)
        return [
            *_srun(len(self.hosts), names), "--export=ALL", "--cpu-bind=none", f"--chdir={self.folder}",
            f"--wait={_STRAGGLER_SECONDS}", "--kill-on-bad-exit=0", *self.node_words(None), "--", *self.words,
        ]  # fmt: skip

    def port_command(self, *, by_slurm: bool) -> list[str]:
        """What prints a free port of the first host."""
        words = [self.python, "-c", FREE_PORT]
        if by_slurm:
            return [*_srun(1, self.hosts[0].name), "--overlap", *words]
        return [*_SSH, "--", self.hosts[0].name, shlex.join(words)]


FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"


def passed_environment(environ: Mapping[str, str], asked: Sequence[str] = ()) -> dict[str, str]:
    """The variables that a host gets: those that steer the run's libraries, and those that were asked for.

    Variables whose names suggest a secret are left out unless they are asked for: everyone on the host sees the words
    of a command.

    Args:
        asked: NAME, whose value is this process's, or NAME=VALUE.

    Raises:
        ConfigError: a name that is none, or that is not set here; all of them at once.
    """
    passed = {
        name: value for name, value in environ.items() if _PASSED.fullmatch(name) and not _SECRET.search(name.upper())
    }
    problems = []
    for text in asked:
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
    """The first hosts up to this number, or all.

    Raises:
        LaunchError: there are fewer.
    """
    if nodes is not None and nodes > len(hosts):
        shown = ", ".join(host.name for host in hosts[:8]) + (", ..." if len(hosts) > 8 else "")
        raise LaunchError(
            f"--nodes {nodes} needs {nodes} hosts, and {source} names {len(hosts)} ({shown}). Use --nodes "
            f"{len(hosts)}, or add hosts."
        )
    return tuple(hosts[:nodes])


def choose_devices(hosts: Sequence[Host], devices: int | None) -> int:
    """The ranks of every node: what was asked for, else what every host offers, else 1.

    Raises:
        LaunchError: a host offers fewer, or they differ and nothing was asked for.
    """
    offered = {host.name: host.slots for host in hosts if host.slots is not None}
    if devices is None:
        counts = sorted(set(offered.values()))
        if len(counts) > 1:
            shown = ", ".join(f"{name} {count}" for name, count in list(offered.items())[:8])
            raise LaunchError(
                f"The hosts have different numbers of slots ({shown}), and every node runs the same number of ranks. "
                f"Give --devices-per-node {counts[0]}, or leave hosts out."
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
    """The nodes of the Slurm job around this process, with the ranks that it was asked to run on each.

    Raises:
        LaunchError: there is no job, or its variables cannot be read.
    """
    job = find_slurm_job(environ)
    if job is None:
        raise LaunchError(
            "--slurm needs a Slurm job around it, and SLURM_JOB_NODELIST is not set. Submit it in a batch script "
            "(sbatch examples/slurm/pretrain.slurm), or run it inside salloc; --dry-run with --hosts shows the command "
            "without a job."
        )
    return [Host(name, job.tasks_per_node) for name in job.hosts]


def _srun(nodes: int, names: str) -> list[str]:
    return ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--nodelist={names}"]
