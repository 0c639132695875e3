"""Host files in the forms of DeepSpeed, Open MPI, MPICH and PBS."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError, LaunchError
from trident.launch.hostfile import Host, is_host_name, named_hosts, parse_hosts, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("worker-1 slots=4\nworker-2 slots=8\n", [("worker-1", 4), ("worker-2", 8)]),
        ("# all\n\na slots = 2 max_slots=4 # fast\nuser@b slots=2", [("a", 2), ("user@b", 2)]),
        ("a:4\nb:2\n", [("a", 4), ("b", 2)]),
        ("a\nb\n10.0.0.3\n", [("a", None), ("b", None), ("10.0.0.3", None)]),
        ("a\na\nb\nb\n", [("a", 2), ("b", 2)]),
        ("a slots=2\nb\na slots=3\n", [("a", 5), ("b", None)]),
        ("node[003-004,011]:8\r\n", [("node003", 8), ("node004", 8), ("node011", 8)]),
        ("fe80::1 slots=2\n[fe80::2]:4\n", [("fe80::1", 2), ("[fe80::2]", 4)]),
    ],
)
def test_forms(text: str, hosts: list[tuple[str, int | None]]) -> None:
    assert parse_hosts(text, "hosts") == [Host(*one) for one in hosts]


def test_addresses() -> None:
    assert [Host(name).address for name in ("a", "me@b.c", "me@[fe80::2]")] == ["a", "b.c", "fe80::2"]
    assert named_hosts("n[1-2],n1") == [Host("n1"), Host("n2")]
    assert not any(map(is_host_name, ("-oProxyCommand=x", "a b", "a;b", "$(x)", "", "@a", "a\n", "-u@a")))


def test_all_bad_lines_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=x\nok\n-oProxyCommand=evil\nb slots=0\nc[2-1]\n")
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    first, second, third, fourth = caught.value.problems
    assert first.startswith(f"{path}, line 1: 'slots=x' is unknown. A line must look like `node1 slots=8`")
    assert "line 3: '-oProxyCommand=evil' is not a host name" in second
    assert "line 4: 'b' has 0 slots" in third
    assert "line 5: Cannot parse the range '2-1'" in fourth


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--ssh .*missing cannot be read: No such file"):
        read_hostfile(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read: it is not text"):
        read_hostfile(tmp_path / "binary")
    with pytest.raises(ConfigError, match="hosts names no host"):
        parse_hosts("# nothing\n", "hosts")
    with pytest.raises(ConfigError, match=r"--hosts: '-x' is not a host name"):
        named_hosts("-x,a")
    with pytest.raises(LaunchError, match="Cannot parse the host list"):
        named_hosts("a[1")
