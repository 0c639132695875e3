"""Host lists as Slurm writes them; test_slurm.py compares them with Slurm's own program."""

from __future__ import annotations

import pytest

from megatron.errors import LaunchError
from megatron.launch.slurm import expand_hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[003-005,011]", "node003 node004 node005 node011"),
        ("a, b[1-2],,c-d", "a b1 b2 c-d"),
        ("n[98-101],n[098-101]", "n98 n99 n100 n101 n098 n099 n100 n101"),
        ("r[1-2]n[09-10]", "r1n09 r1n10 r2n09 r2n10"),
        ("a[0-1]b[0-1]c[0-1]", "a0b0c0 a0b0c1 a1b0c0 a1b0c1 a0b1c0 a0b1c1 a1b1c0 a1b1c1"),
        ("n[1-2]-ib.cluster", "n1-ib.cluster n2-ib.cluster"),
        ("[1-2]", "1 2"),
    ],
)
def test_expansion(text: str, hosts: str) -> None:
    assert expand_hostlist(text) == hosts.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Cannot read the host list ''"),
        (",", "Cannot read the host list ','"),
        ("node[1-2", r"Cannot read the host list 'node\[1-2'.*node\[003-007,011\]"),
        ("node1-2]", "Cannot read the host list"),
        ("node[[1]]", "Cannot read the host list"),
        ("a[1,b[2-3]]", "brackets that are not nested"),
        ("node[5-3]", r"Cannot read the range '5-3' in the host list 'node\[5-3\]'"),
        ("node[a-b]", "Cannot read the range 'a-b'"),
        ("node[]", "Cannot read the range ''"),
        ("node[1,]", "Cannot read the range ''"),
        ("n[1-70000]", "'1-70000' means 70000 hosts, and a host list may hold 65536"),
        ("n[1-999]m[1-999]", "means 998001 hosts"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        expand_hostlist(text)
