"""The Slurm job of a process, and expansion of Slurm host lists such as `node[003-007,011],login`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.errors import LaunchError

_MOST_HOSTS = 65_536  # as in Slurm's own programs
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class SlurmJob:
    """The allocation of a job, as seen by its batch script or shell.

    Args:
        hosts: in Slurm's order; rank 0 runs on the first.
        tasks_per_node: as requested, else one per GPU of this node; None if Slurm sets neither.
        master_address: MASTER_ADDR, if set.
    """

    job: str
    hosts: tuple[str, ...]
    tasks_per_node: int | None
    master_address: str | None

    @property
    def command(self) -> str:
        return f"srun --nodes={len(self.hosts)} --ntasks-per-node={self.tasks_per_node or 1} python -u"


def find_slurm_job(environ: Mapping[str, str]) -> SlurmJob | None:
    """The job of this process; None outside a job.

    Raises:
        LaunchError: the node list or a number cannot be parsed.
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

    Numbers keep the leading zeros of the start of their range. A name may have several pairs of brackets, such as
    `r[0-1]n[1-2]`: the last one varies fastest, then the first, as in Slurm. Unlike Slurm, text after the last pair is
    accepted.

    Raises:
        LaunchError: unbalanced or nested brackets, a malformed range, no host, or too many hosts.

    Source: the output of `scontrol show hostnames`, Slurm 22.05.
    """
    items = [item.strip() for item in _ITEM.findall(text)]
    hosts = [host for item in items if item for host in _expand_item(item, text)]
    if not hosts or re.search(r"[\[\]]", _BRACKETS.sub("", text)):
        raise LaunchError(
            f"Cannot parse the host list {text!r}. Expected names separated by commas, with numbers in brackets that "
            f"are not nested, such as node[003-007,011]."
        )
    return hosts


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise LaunchError(
            f"{name}={text!r} is not a number of tasks. Slurm sets this variable; unset it if it is from another job."
        )
    return int(text)


def _expand_item(item: str, text: str) -> list[str]:
    parts = _BRACKETS.split(item)  # alternating plain text and contents of brackets
    plain, ranges = parts[::2], [_numbers(inside, text) for inside in parts[1::2]]
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
    """The numbers in one pair of brackets, as they appear in host names."""
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise LaunchError(f"Cannot parse the range {part!r} in the host list {text!r}. Expected, e.g., 003-007.")
        if int(last) - int(first) >= _MOST_HOSTS:
            raise _too_many(part, int(last) - int(first) + 1)
        numbers.extend(f"{value:0{len(first)}d}" for value in range(int(first), int(last) + 1))
    return numbers


def _too_many(part: str, count: int) -> LaunchError:
    return LaunchError(f"{part!r} expands to {count} hosts; at most {_MOST_HOSTS} are allowed. Check the range.")
