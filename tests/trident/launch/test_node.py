"""The ranks of one node: their environment, and how they exit."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.errors import LaunchError
from megatron.parallel.launchers import discover_ranks
from trident.launch.node import Node, rank_commands, run_node
from trident.launch.supervise import GracePeriods

NODE = Node(index=1, nodes=2, devices=2, master_address="head", master_port=1234)
WRITE = (
    "import json, os, sys; json.dump([dict(os.environ), os.getsid(0), os.getpid()], open(os.environ['RANK'], 'w')); "
    "sys.exit(int(os.environ['RANK']) == 3 and 78)"
)
WAIT = (
    "import os, signal, sys, time; signal.signal(signal.SIGUSR1, lambda n, f: sys.exit(75)); "
    "open('ready' + os.environ['RANK'], 'w'); time.sleep(60)"
)


def test_environment_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"PATH": os.environ["PATH"], "RANK": "stale", "KEPT": "a b"}
    assert run_node(NODE, [sys.executable, "-c", WRITE], environ, GracePeriods()) == 78
    for local_rank, rank in enumerate((2, 3)):
        found, session, process = json.loads((tmp_path / str(rank)).read_text())
        ranks = discover_ranks(found)
        assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.launcher) == (rank, 4, local_rank, "launch")
        assert (ranks.master_address, ranks.master_port, ranks.is_one_node) == ("head", 1234, False)
        assert found["KEPT"] == "a b" and int(found["OMP_NUM_THREADS"]) >= 1 and session == process


def test_shown_commands_are_those_that_run(tmp_path: Path) -> None:
    commands = rank_commands(NODE, [sys.executable, "-c", WRITE])
    ends = [subprocess.run(shlex.split(one), cwd=tmp_path, check=False).returncode for one in commands]
    assert ends == [0, 78] and json.loads((tmp_path / "3").read_text())[0]["LOCAL_RANK"] == "1"


def test_the_control_stream_sends_signals_and_its_end_terminates_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    over = threading.Event()

    def lines(*words: str) -> Iterator[str]:
        while not all((tmp_path / f"ready{rank}").exists() for rank in NODE.ranks):
            time.sleep(0.01)
        for word in words:
            yield word
            over.wait()

    command = [sys.executable, "-IS", "-c", WAIT]
    assert run_node(NODE, command, os.environ, GracePeriods(30, 30), lines("SIGUSR1\n")) == 75
    over.set()
    for rank in NODE.ranks:
        (tmp_path / f"ready{rank}").unlink()
    assert run_node(NODE, command, os.environ, GracePeriods(30, 30), lines()) == 143


def test_a_command_that_cannot_start() -> None:
    with pytest.raises(LaunchError, match=r"/no/python cannot be started: No such file.*--python"):
        run_node(NODE, ["/no/python"], os.environ, GracePeriods())
