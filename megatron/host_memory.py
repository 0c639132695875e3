"""Total and available host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.files.plain import read_plain_text


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Available host memory in bytes, within the limits of the control group; None if unknown.

    Memory that only caches files counts as available.

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
    """Host memory in bytes that processes can use at most, including swap space; None if unknown.

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
    """The control groups of this process with the names of their limit, usage and file cache."""
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
    """The number in a file; None for a word, such as `max`, or a missing file."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _number_after(path: Path, name: str, unit_bytes: int) -> int | None:
    """The number in the line of a file that starts with a name."""
    for line in _text(path).splitlines():
        fields = line.split()
        if len(fields) > 1 and fields[0] == name and fields[1].isdecimal():
            return int(fields[1]) * unit_bytes
    return None


def _text(path: Path) -> str:
    try:
        return read_plain_text(path)
    except OSError:
        return ""
