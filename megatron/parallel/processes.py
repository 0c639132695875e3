"""The identity of a process, unambiguous even if its id is reused or in another container; the limit on open files."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of a run.

    Attributes:
        machine: differs between machines and their reboots.
        namespace: differs between containers of one machine.
        born: its start time, from `born_at`.
        place: `ParallelMesh.place` of its rank; empty if it has no rank yet or is the only one.
    """

    host: str
    machine: str
    namespace: str
    process_id: int
    born: str
    place: str = ""

    @classmethod
    def own(cls) -> ProcessIdentity:
        """This process."""
        process_id = os.getpid()
        return cls(socket.gethostname(), machine_id(), process_namespace(), process_id, born_at(process_id))

    def is_neighbour(self, other: ProcessIdentity) -> bool:
        """Returns True if the two share a kernel and its process ids."""
        return (self.machine, self.namespace) == (other.machine, other.namespace)

    def kill(self) -> bool:
        """Sends SIGKILL to a neighbour of this process, if it still runs; returns True if it was sent."""
        if not self.is_neighbour(ProcessIdentity.own()) or not self.born or born_at(self.process_id) != self.born:
            return False
        try:
            os.kill(self.process_id, signal.SIGKILL)
        except OSError:
            return False
        return True

    def is_stopped(self) -> bool:
        """Returns True for a neighbour of this process that a signal or a debugger has stopped."""
        if not self.is_neighbour(ProcessIdentity.own()) or not self.born:
            return False
        fields = _stat_fields(self.process_id)
        return len(fields) >= 20 and fields[19] == self.born and fields[0] in "Tt"

    def __str__(self) -> str:
        return f"process {self.process_id} on {self.host}" + (f", {self.place}" if self.place else "")


def machine_id() -> str:
    """A text unique to this machine since its last boot."""
    return _first_line(Path("/proc/sys/kernel/random/boot_id")) or f"host {socket.gethostname()}"


def process_namespace() -> str:
    """A text that is equal for two processes of a machine if they share process ids."""
    return _link(Path("/proc/self/ns/pid"))


def network_namespace() -> str:
    """A text that is equal for two processes of a machine if they share its loopback interface."""
    return _link(Path("/proc/self/ns/net"))


def born_at(process_id: int) -> str:
    """The start time of a process in clock ticks since boot, to detect reused ids; empty if it has exited."""
    fields = _stat_fields(process_id)
    return "" if len(fields) < 20 or fields[0] in "ZX" else fields[19]


def allow_open_files(count: int) -> int:
    """Raises the soft limit on open files to `count`, within the hard limit; returns how many of these may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    target = max(soft, count if hard == resource.RLIM_INFINITY else min(count, hard))
    with contextlib.suppress(OSError, ValueError):  # macOS has a limit below the hard one
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return min(soft, count)


def _stat_fields(process_id: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on, after the name; empty if the process has exited."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
