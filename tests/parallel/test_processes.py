"""Processes that are told apart even if their number is used again, and killed only where the number means them."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.parallel.processes import ProcessIdentity, born_at

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc to see processes")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_neighbour_is_killed_even_if_it_is_stopped(child: subprocess.Popen[bytes]) -> None:
    own = ProcessIdentity.own()
    other = dataclasses.replace(own, process_id=child.pid, born=born_at(child.pid))
    assert own.is_neighbour(other) and str(other) == f"process {child.pid} on {own.host}"
    assert not other.is_stopped()
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert other.is_stopped() and not dataclasses.replace(other, machine="another").is_stopped()
    assert other.kill()
    assert child.wait(120) == -signal.SIGKILL
    assert not other.kill() and born_at(child.pid) == ""


@pytest.mark.parametrize("changed", [{"machine": "another"}, {"namespace": "another"}, {"born": "1"}, {"born": ""}])
def test_another_process_of_that_number_is_not(child: subprocess.Popen[bytes], changed: dict[str, str]) -> None:
    known = {"process_id": child.pid, "born": born_at(child.pid)}
    assert not dataclasses.replace(ProcessIdentity.own(), **{**known, **changed}).kill()
    assert child.poll() is None


def test_the_birth_of_a_process_does_not_change() -> None:
    assert born_at(os.getpid()) == ProcessIdentity.own().born != ""
