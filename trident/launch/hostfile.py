"""Host files in the formats of DeepSpeed, Open MPI and MPICH, or with one name per line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import ConfigError, LaunchError, printable
from megatron.files.plain import read_plain_text
from megatron.slurm import expand_hostlist

_MOST_BYTES = 16 << 20
# A name that starts with a hyphen would be an option of ssh.
_NAME = re.compile(r"(?:[\w.+][\w.+-]*@)?(?:\w[\w.-]*|\[?[0-9A-Fa-f]*:[0-9A-Fa-f:.]+(?:%\w+)?\]?)")
_SLOTS = re.compile(r"slots\s*=\s*(\d+)")
_OTHER_FIELD = re.compile(r"max[-_]slots\s*=\s*\d+")
_LABEL = re.compile(r"([^:]+|\[[^\]]+\]):(\d+)")


@dataclass(frozen=True)
class Host:
    """A host of a run.

    Attributes:
        name: the argument of `ssh`; may begin with a user and @.
        slots: processes it may run; None if the host file does not set them.
    """

    name: str
    slots: int | None = None

    @property
    def address(self) -> str:
        """Name without the user, for connections from other hosts."""
        return self.name.rpartition("@")[2].strip("[]")


def read_hostfile(path: Path) -> list[Host]:
    """Reads a host file.

    A line is `host`, `host slots=8` (DeepSpeed, Open MPI), `host:8` (MPICH, Intel MPI) or Slurm's `node[003-007]`; a
    `#` begins a comment. A host that is listed on several lines gets the sum of its slots, 1 for a line without, as in
    Open MPI.

    Raises:
        ConfigError: the file cannot be read, names no host, or has malformed lines; all problems at once.
    """
    try:
        text = read_plain_text(path, _MOST_BYTES)
    except (OSError, UnicodeDecodeError) as failure:
        reason = getattr(failure, "strerror", None) or "it is not text"
        raise ConfigError(f"--ssh {path} cannot be read: {reason}. Give a file with a host on each line.") from failure
    return parse_hosts(text, str(path))


def parse_hosts(text: str, source: str) -> list[Host]:
    """Parses the text of a host file.

    Args:
        source: the file's name, for messages.

    Raises:
        ConfigError: as `read_hostfile`.
    """
    slots_of: dict[str, list[int | None]] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        try:
            for host in _hosts_of(entry) if entry else ():
                slots_of.setdefault(host.name, []).append(host.slots)
        except (ValueError, LaunchError) as failure:
            problems.append(f"{source}, line {number}: {failure}")
    if not slots_of and not problems:
        problems.append(f"{source} names no host. It must have a host on each line, for example: node1 slots=8")
    if problems:
        raise ConfigError(problems)
    return [
        Host(name, slots[0] if len(slots) == 1 else sum(count or 1 for count in slots))
        for name, slots in slots_of.items()
    ]


def named_hosts(text: str) -> list[Host]:
    """Expands a host list such as `node[003-007,011]`.

    Raises:
        LaunchError: the list is malformed.
        ConfigError: one of its names is not a host name.
    """
    names = expand_hostlist(text)
    problems = [f"--hosts: {_not_a_name(name)}" for name in names if not is_host_name(name)]
    if problems:
        raise ConfigError(problems)
    return [Host(name) for name in dict.fromkeys(names)]


def is_host_name(name: str) -> bool:
    """True if a text is a host name or address, with or without a user; never an option or shell syntax."""
    return _NAME.fullmatch(name) is not None


def _hosts_of(line: str) -> Iterator[Host]:
    first, *fields = re.sub(r"\s*=\s*", "=", line).split()
    slots: int | None = None
    for field in fields:
        match = _SLOTS.fullmatch(field)
        if match:
            slots = int(match[1])
        elif not _OTHER_FIELD.fullmatch(field):
            raise ValueError(
                f"{printable(field)} is unknown. A line must look like `node1 slots=8`, `node1:8` or `node1`."
            )
    labelled = _LABEL.fullmatch(first)
    if labelled and slots is None:
        first, slots = labelled[1], int(labelled[2])
    if slots == 0:
        raise ValueError(f"{printable(first)} has 0 slots. Give it at least 1, or remove the line.")
    names = expand_hostlist(first) if "[" in first and not first.startswith("[") else [first]
    for name in names:
        if not is_host_name(name):
            raise ValueError(_not_a_name(name))
        yield Host(name, slots)


def _not_a_name(name: str) -> str:
    return f"{printable(name)} is not a host name. Give a name or an address, with user@ before it if needed."
