"""The memory of this machine: how much there is for its processes, and how much can still be taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.files.plain import read_plain_text


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that can still be taken here: what the machine has left, or less in a limited control group.

    None where the system does not say. Memory that only caches files counts as free.

    Args:
        root: the root of the file system, with `proc` and `sys`.

    Source: Linux, proc(5), "MemAvailable"; Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    amounts = [_number_after(root / "proc/meminfo", "MemAvailable:", 1024)]
    for folder, limit_name, usage_name, cache_name in _control_groups(root):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            amounts.append(max(0, limit - usage + (_number_after(folder / "memory.stat", cache_name, 1) or 0)))
    return min((amount for amount in amounts if amount is not None), default=None)


def total_memory_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that the processes here can have at most, swap space included; None where unknown.

    Args:
        root: the root of the file system, with `proc` and `sys`.
    """
    memory = _number_after(root / "proc/meminfo", "MemTotal:", 1024)
    if memory is None:
        return None
    limits = [_number(folder / limit_name) for folder, limit_name, _, _ in _control_groups(root)]
    whole = memory + (_number_after(root / "proc/meminfo", "SwapTotal:", 1024) or 0)
    return min([whole, *(limit for limit in limits if limit is not None)])


def _control_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """The control groups of this process with the names of their limit, their usage, and the part that caches files."""
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
        for parent in (folder, *folder.parents):
            yield parent, *names
            if parent == mount:
                break


def _number(path: Path) -> int | None:
    """The number in a file; None if it holds a word, such as `max`, or is not there."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _number_after(path: Path, name: str, unit_bytes: int) -> int | None:
    """The number in the line of a file that begins with a name."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1]) * unit_bytes
    return None


def _text(path: Path) -> str:
    try:
        return read_plain_text(path)
    except OSError:
        return ""
