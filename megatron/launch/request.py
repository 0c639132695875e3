"""What can be asked of the launcher."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config import ConfigSection, PathUse, flag


@dataclass(frozen=True)
class LaunchRequest(ConfigSection):
    """The flags of `tools/launch.py`; what it starts follows `--`."""

    nodes: int | None = flag(None, "machines; all of the host file or the Slurm job if unset, else 1", at_least=1)
    devices_per_node: int | None = flag(
        None, "ranks on each of them; what the host file or the Slurm job says if unset, else 1", at_least=1
    )
    local: bool = flag(False, "start the ranks of one node here; the default")
    ssh: str | None = flag(
        None, "file of hosts (`host slots=8`, `host:8` or `host` on a line), reached with ssh", path=PathUse.SMALL_FILE
    )
    hosts: str | None = flag(None, "hosts as Slurm writes them, node[003-007,011], instead of a file")
    slurm: bool = flag(False, "the nodes of the Slurm job around this process, reached with srun")
    dry_run: bool = flag(False, "print the command of each node and start nothing")
    node_rank: int | None = flag(
        None, "which of the --nodes this one is, the first is 0; Slurm's number if unset", at_least=0
    )
    master_address: str | None = flag(None, "name or address of the first node, as all others reach it")
    master_port: int | None = flag(None, "a port of the first node; a free one if unset", at_least=1, at_most=65_535)
    python: str = flag(sys.executable, "interpreter on every host")
    directory: str | None = flag(
        None, "folder on every host that the program is started in; this one if unset", path=PathUse.FOLDER
    )
    env: tuple[str, ...] = flag(
        (), "more variables that hosts reached with ssh get, as NAME (with its value here) or NAME=VALUE", nargs="+"
    )
    settle_seconds: float = flag(10.0, "time for the other ranks to end by themselves after one has failed", at_least=0)
    grace_seconds: float = flag(30.0, "time they then have between SIGTERM and SIGKILL", at_least=0)
    skip_check: bool = flag(False, "start without checking the program's flags and layout")
    follow_input: bool = flag(False, "end the ranks when standard input ends; set for hosts reached with ssh")

    def problems(self) -> Iterator[str]:
        ways = {"--local": self.local, "--slurm": self.slurm, "--ssh": self.ssh is not None}
        given = [name for name, is_given in ways.items() if is_given]
        if len(given) > 1:
            yield f"{' and '.join(given)} exclude each other: they say where the ranks run. Give one."
        if self.hosts is not None and (self.local or self.ssh is not None):
            yield f"--hosts and {'--local' if self.local else '--ssh'} both say where the ranks run. Give one."
        if self.node_rank is not None and self.node_rank >= (self.nodes or 1):
            yield (
                f"--node-rank {self.node_rank} is not among {self.nodes or 1} nodes (--nodes). The first is 0 and the "
                f"last {(self.nodes or 1) - 1}."
            )
