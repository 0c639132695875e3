"""Slurm's shorthand for host names, `node[003-007,011],login`, written out."""

from __future__ import annotations

import itertools
import math
import re

from megatron.errors import LaunchError

_MOST_HOSTS = 65_536  # as in Slurm, whose own programs refuse more
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


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


def _expand_item(item: str, text: str) -> list[str]:
    pieces = _BRACKETS.split(item)  # plain text and the insides of brackets in turn
    plain, ranges = pieces[::2], [_numbers(inside, text) for inside in pieces[1::2]]
    if not ranges:
        return [item]
    count = math.prod(map(len, ranges))
    if count > _MOST_HOSTS:
        raise _too_many(item, count)
    *leading, last = ranges
    found = []
    for chosen in itertools.product(*reversed(leading), last):
        numbers = [*reversed(chosen[:-1]), chosen[-1]]
        found.append("".join(itertools.chain(*zip(plain, numbers, strict=False))) + plain[-1])
    return found


def _numbers(inside: str, text: str) -> list[str]:
    """The numbers of one pair of brackets, as they are written."""
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise LaunchError(f"Cannot read the range {part!r} in the host list {text!r}. It must look like 003-007.")
        if int(last) - int(first) >= _MOST_HOSTS:
            raise _too_many(part, int(last) - int(first) + 1)
        found.extend(f"{value:0{len(first)}d}" for value in range(int(first), int(last) + 1))
    return found


def _too_many(part: str, count: int) -> LaunchError:
    return LaunchError(f"{part!r} stands for {count} hosts, and a host list may hold {_MOST_HOSTS}. Check the range.")
