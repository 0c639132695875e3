"""Files that list the hosts of a run, in the forms that DeepSpeed, Open MPI and MPICH read, or one name per line."""

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
        name: what `ssh` is given; may begin with a user and @.
        slots: processes it may run; None if its file does not say.
    """

    name: str
    slots: int | None = None

    @property
    def address(self) -> str:
        """The name under which other hosts reach it."""
        return self.name.rpartition("@")[2].strip("[]")


def read_hostfile(path: Path) -> list[Host]:
    """Reads a host file.

    A line is `host`, `host slots=8` (DeepSpeed, Open MPI), `host:8` (MPICH, Intel MPI) or Slurm's `node[003-007]`; a
    `#` begins a comment. A host that is listed on several lines gets the sum of its slots, 1 for a line without, as in
    Open MPI.

    Raises:
        ConfigError: the file cannot be read, names no host, or has lines of another form; all of them at once.
    """
    try:
        text = read_plain_text(path, _MOST_BYTES)
    except (OSError, UnicodeDecodeError) as failure:
        reason = getattr(failure, "strerror", None) or "it is not text"
        raise ConfigError(f"--ssh {path} cannot be read: {reason}. Give a file with a host on each line.") from failure
    return parse_hosts(text, str(path))


def parse_hosts(text: str, source: str) -> list[Host]:
    """The hosts of a host file's text.

    Args:
        source: the file's name, for messages.

    Raises:
        ConfigError: as `read_hostfile`.
    """
    slots_of: dict[str, list[int | None]] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        try:
            for host in _hosts_of(words) if words else ():
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
    """The hosts of a host list, `node[003-007,011]`.

    Raises:
        LaunchError: the list cannot be read.
        ConfigError: a name in it is not a host name.
    """
    names = expand_hostlist(text)
    problems = [f"--hosts: {_not_a_name(name)}" for name in names if not is_host_name(name)]
    if problems:
        raise ConfigError(problems)
    return [Host(name) for name in dict.fromkeys(names)]


def is_host_name(name: str) -> bool:
    """Whether a text can be a host name or address, with or without a user; never an option or a shell's words."""
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
