"""Hosts reached by ssh or srun, and hosts that cannot be reached."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.errors import LaunchError
from tests.helpers.machines.fake_ssh import FakeSsh
from trident.launch.hostfile import Host
from trident.launch.plan import FREE_PORT, Plan
from trident.launch.remote import exec_srun, free_port, run_by_ssh
from trident.launch.supervise import GracePeriods

PLAN = Plan((Host("a"), Host("b")), 1, "launch.py", sys.executable, "/", ("p.py",), {}, "a", 1234, GracePeriods(0, 5))


def test_a_free_port() -> None:
    assert 1024 < free_port([sys.executable, "-c", FREE_PORT], "here") < 65536


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/no/ssh"], r"no free port found on a: /no/ssh cannot be started: No such file.*--master-port"),
        (["sh", "-c", "echo denied >&2; exit 255"], "no free port found on a: denied"),
        (["sh", "-c", "echo welcome"], "it printed no number"),
    ],
)
def test_a_host_without_a_free_port(command: list[str], reason: str) -> None:
    with pytest.raises(LaunchError, match=reason):
        free_port(command, "a")


def test_hosts_that_cannot_be_reached_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = FakeSsh(tmp_path / "other", monkeypatch)
    ssh.breaks_after(0)
    with pytest.raises(LaunchError, match=r"ssh failed for a, b; its message is above. Check that `ssh a` works"):
        run_by_ssh(PLAN)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="ssh cannot be started: No such file"):
        run_by_ssh(PLAN)
    with pytest.raises(LaunchError, match="srun cannot be started: No such file"):
        exec_srun(PLAN)
