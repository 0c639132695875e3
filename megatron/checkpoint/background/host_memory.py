"""Host memory: what can still be taken, and whether copies of all the ranks of a machine fit."""

from __future__ import annotations

import socket
from pathlib import Path

from megatron.parallel.agreement import gather_on_first, run_on_first
from megatron.parallel.mesh import ParallelMesh


def memory_problem(size_bytes: int, mesh: ParallelMesh, available_bytes: int | None) -> str | None:
    """Why the copies of all ranks do not fit into the memory of their machines; None if they do; collective.

    Args:
        size_bytes: what this rank's copy takes.
        available_bytes: what this rank sees of its machine's memory; None if unknown.
    """
    told = gather_on_first(mesh, lambda: [socket.gethostname(), size_bytes, available_bytes])

    def judge() -> str | None:
        machines: dict[str, list[tuple[int, int | None]]] = {}
        for host, size, available in told or []:
            machines.setdefault(host, []).append((size, available))
        for host, ranks in machines.items():
            need = sum(size for size, _ in ranks)
            room = min((available for _, available in ranks if available is not None), default=None)
            if room is not None and need > room:
                return (
                    f"a copy of the state of the {len(ranks)} rank(s) on {host} takes {need} bytes of host memory, and "
                    f"{room} bytes are available there"
                )
        return None

    problem: str | None = run_on_first(mesh, judge)
    return problem


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that can still be taken here: what the machine has left, or less in a limited control group.

    None where the system does not say. Memory that only caches files counts as free.

    Args:
        root: the root of the file system, with `proc` and `sys`.

    Source: Linux, proc(5), "MemAvailable"; Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    rooms = [_number_after(root / "proc/meminfo", "MemAvailable:", 1024)]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = mount / group.lstrip("/")
        for place in (folder, *folder.parents):
            rooms.append(_room_bytes(place, *names))
            if place == mount:
                break
    known = [room for room in rooms if room is not None]
    return min(known, default=None)


def _room_bytes(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    """What a control group may still take; None if it has no limit."""
    most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
    if not most.isdecimal() or not used.isdecimal():
        return None
    return max(0, int(most) - int(used) + (_number_after(folder / "memory.stat", cache, 1) or 0))


def _number_after(path: Path, name: str, unit_bytes: int) -> int | None:
    """The number in the line of a file that begins with a name."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1]) * unit_bytes
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
