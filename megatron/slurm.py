"""The Slurm job around a process, and Slurm's shorthand for host names, `node[003-007,011],login`, written out."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.errors import LaunchError

_MOST_HOSTS = 65_536  # as in Slurm, whose own programs refuse more
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class SlurmJob:
    """The nodes that Slurm gave to a job, as its batch script or shell sees them.

    Args:
        hosts: in Slurm's order; rank 0 runs on the first.
        tasks_per_node: as asked for, else one for each GPU of this node; None if Slurm says neither.
        master_address: the value of MASTER_ADDR, if it is set.
    """

    job: str
    hosts: tuple[str, ...]
    tasks_per_node: int | None
    master_address: str | None

    @property
    def command(self) -> str:
        return f"srun --nodes={len(self.hosts)} --ntasks-per-node={self.tasks_per_node or 1} python -u"


def find_slurm_job(environ: Mapping[str, str]) -> SlurmJob | None:
    """The job around this process; None outside of one.

    Raises:
        LaunchError: the node list or a number cannot be read.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodelist:
        return None
    tasks_name = next((name for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE") if environ.get(name)), None)
    return SlurmJob(
        environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "?",
        tuple(expand_hostlist(nodelist)),
        None if tasks_name is None else _number(environ, tasks_name),
        environ.get("MASTER_ADDR") or None,
    )


def expand_hostlist(text: str) -> list[str]:
    """Expands a host list: `node[003-004,011],login` is node003, node004, node011, login.

    A number keeps the leading zeros of the start of its range. A name may have several pairs of brackets, such as
    `r[0-1]n[1-2]`: the last one runs fastest, then the first, as Slurm has it. What follows the last pair is kept,
    which Slurm refuses.

    Raises:
        LaunchError: brackets that do not match or are nested, a malformed range, no host, or too many hosts.

    Source: the output of `scontrol show hostnames`, Slurm 22.05.
    """
    items = [item.strip() for item in _ITEM.findall(text)]
    hosts = [host for item in items if item for host in _expand_item(item, text)]
    if not hosts or re.search(r"[\[\]]", _BRACKETS.sub("", text)):
        raise LaunchError(
            f"Cannot read the host list {text!r}. It must look like node[003-007,011]: names separated by commas, with "
            f"numbers in brackets that are not nested."
        )
    return hosts


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise LaunchError(
            f"{name}={text!r} is not a number of tasks. Slurm sets it; unset it if another job left it behind."
        )
    return int(text)


def _expand_item(item: str, text: str) -> list[str]:
    pieces = _BRACKETS.split(item)  # plain text and the insides of brackets in turn
    plain, ranges = pieces[::2], [_numbers(inside, text) for inside in pieces[1::2]]
    if not ranges:
        return [item]
    count = math.prod(map(len, ranges))
    if count > _MOST_HOSTS:
        raise _too_many(item, count)
    *leading, last = ranges
    hosts = []
    for chosen in itertools.product(*reversed(leading), last):
        numbers = [*reversed(chosen[:-1]), chosen[-1]]
        hosts.append("".join(itertools.chain(*zip(plain, numbers, strict=False))) + plain[-1])
    return hosts


def _numbers(inside: str, text: str) -> list[str]:
    """The numbers of one pair of brackets, as they are written."""
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise LaunchError(f"Cannot read the range {part!r} in the host list {text!r}. It must look like 003-007.")
        if int(last) - int(first) >= _MOST_HOSTS:
            raise _too_many(part, int(last) - int(first) + 1)
        numbers.extend(f"{value:0{len(first)}d}" for value in range(int(first), int(last) + 1))
    return numbers


def _too_many(part: str, count: int) -> LaunchError:
    return LaunchError(f"{part!r} means {count} hosts, and a host list may hold {_MOST_HOSTS}. Check the range.")
