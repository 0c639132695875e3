"""The launcher as a program: dry runs, hosts behind a stand-in for ssh, and how everything ends with it."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.errors import ConfigError, LaunchError
from megatron.parallel.processes import born_at
from tests.config.command_lines import words
from tests.helpers.machines.fake_ssh import FakeSsh
from trident.launch.launching import LaunchRequest, check_program, launch

TOOL = Path(__file__).parents[3] / "tools" / "launch.py"
# Writes what it was given; then ends with a code at once, or saves at SIGTERM.
PROGRAM = """
import json, os, signal, sys, time
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
with open(rank + ".tmp", "w") as file:
    json.dump([dict(os.environ), sys.argv[1:], os.getpid()], file)
os.rename(rank + ".tmp", rank)
if rank == sys.argv[1]:
    sys.exit(int(sys.argv[2]))
time.sleep(float(sys.argv[3]))
"""


def tool(*more: str) -> list[str]:
    return [sys.executable, str(TOOL), *more]


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    """Two hosts with two slots each, in `hosts`, and a program, in `p.py`."""
    ssh = FakeSsh(tmp_path / "other", monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("me@localhost slots=2\n127.0.0.1:2\n")
    (tmp_path / "p.py").write_text(PROGRAM)
    return ssh


def test_a_dry_run_needs_no_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    program = ["pretrain_gpt.py", *words("--tensor-model-parallel-size 2")]
    assert launch(LaunchRequest(nodes=2, devices_per_node=2, dry_run=True), program, "/x/launch.py") == 0
    first, command, second, _ = capsys.readouterr().out.splitlines()
    assert (first, second) == ("# node 0: ranks 0 to 1", "# node 1: ranks 2 to 3")
    place = "--nodes 2 --devices-per-node 2 --node-rank 0 --master-address FIRST_NODE --master-port 29500"
    assert command.startswith(f"python tools/launch.py {place} -- pretrain_gpt.py --num-layers")


@pytest.mark.parametrize(
    "request_",
    [LaunchRequest(nodes=2, dry_run=True), LaunchRequest(hosts="a,b", dry_run=True), LaunchRequest(dry_run=True)],
)
def test_a_dry_run_shows_no_secret(request_: LaunchRequest, capsys: pytest.CaptureFixture[str]) -> None:
    program = ["pretrain_gpt.py", *words(""), "--log-path", "me:s3same@db.example.com"]
    request = dataclasses.replace(request_, devices_per_node=1, env=("MY_SECRET=s3same",))
    assert launch(request, program, "/x/launch.py") == 0
    assert "***" in (shown := capsys.readouterr().out) and "s3same" not in shown


def test_a_dry_run_shows_what_would_run_on_each_node(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ["pretrain_gpt.py", *words("--tensor-model-parallel-size 2"), "--log-path", "a b"]
    request = LaunchRequest(hosts="node[003-004,011]", nodes=2, devices_per_node=2, dry_run=True, env=("A=1 2",))
    assert launch(request, program, "/x/launch.py") == 0
    shown = capsys.readouterr()
    assert "4 ranks: 2 tensor x 1 pipeline x 2 data" in shown.err
    first, command, second, _ = shown.out.splitlines()
    assert (first, second) == ("# node003: ranks 0 to 1", "# node004: ranks 2 to 3")
    remote = shlex.split(shlex.split(command)[-1])
    assert "A=1 2" in remote and remote[remote.index("--") + 1 :] == program

    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert launch(LaunchRequest(slurm=True, devices_per_node=1, dry_run=True), program, "/x/launch.py") == 0
    shown = capsys.readouterr()
    comment, command = shown.out.splitlines()
    assert comment == "# n1, n2" and command.startswith(
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=n1,n2"
    )

    assert launch(LaunchRequest(devices_per_node=2, dry_run=True), program, "/x/launch.py") == 0
    shown = capsys.readouterr()
    assert [line.split()[1] for line in shown.out.splitlines()] == ["RANK=0", "RANK=1"]


@pytest.mark.parametrize(
    ("request_", "error", "match"),
    [
        (LaunchRequest(nodes=2), ConfigError, "--local with --nodes 2 requires --master-address and --master-port"),
        (
            LaunchRequest(nodes=2, master_address="a", master_port=1),
            ConfigError,
            "requires --node-rank, from 0 to 1",
        ),
        (LaunchRequest(slurm=True), LaunchError, "--slurm requires a surrounding Slurm job"),
        (LaunchRequest(hosts="a", nodes=2), LaunchError, r"--nodes 2 requires 2 hosts, and --hosts a names 1 \(a\)"),
    ],
)
def test_refusals(request_: LaunchRequest, error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(error, match=match):
        launch(request_, ["other.py"], "launch.py")
    with pytest.raises(ConfigError, match="no program given. Put it after --"):
        launch(request_, [], "launch.py")


def test_nothing_starts_that_does_not_fit() -> None:
    done = subprocess.run(
        tool("--devices-per-node", "3", "--", "pretrain_gpt.py", *words("--lr 0 --save-interval -1")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 64 and "--save-interval" in done.stderr and done.stdout == ""


def test_ranks_on_hosts_and_their_exit_code(other: FakeSsh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TEST", "a 'b' $c")
    command = tool(
        "--ssh", "hosts", "--env", "MINE=1", "--settle-seconds", "0", "--", "p.py", "2", "77", "600", "it's $x"
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 77, done.stderr
    found = [json.loads(Path(str(rank)).read_text()) for rank in range(4) if Path(str(rank)).exists()]
    assert len(found) >= 1
    environment, arguments, _ = json.loads(Path("2").read_text())
    assert arguments == ["2", "77", "600", "it's $x"]
    assert environment["NCCL_TEST"] == "a 'b' $c" and environment["MINE"] == "1"
    assert (environment["WORLD_SIZE"], environment["LOCAL_RANK"], environment["MASTER_ADDR"]) == ("4", "0", "localhost")
    ports = {one[0]["MASTER_PORT"] for one in found}
    assert len(ports) == 1 and len(other.calls) == 3 and "me@localhost" in other.calls[0]
    _wait_until_gone([one[2] for one in found])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 75), (signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_the_hosts_end_with_the_launcher(other: FakeSsh, number: signal.Signals, code: int) -> None:
    launcher = subprocess.Popen(tool("--ssh", "hosts", "--", "p.py", "-", "0", "600"), stderr=subprocess.PIPE)
    _wait_until(lambda: all(Path(str(rank)).exists() for rank in range(4)))
    processes = [json.loads(Path(str(rank)).read_text())[2] for rank in range(4)]
    launcher.send_signal(number)
    launcher.communicate()
    assert launcher.returncode == code
    _wait_until_gone(processes)


def _wait_until_gone(processes: list[int]) -> None:
    _wait_until(lambda: not any(map(born_at, processes)))


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


FLAGS = words()


def test_the_layout_is_shown() -> None:
    flags = [*FLAGS, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    assert check_program(["somewhere/pretrain_gpt.py", *flags], 8) == ["8 ranks: 2 tensor x 2 pipeline x 2 data"]
    chosen, told = check_program(["pretrain_gpt.py", *flags, "--elastic"], 2)
    assert "using 2 x 1 x 1 data" in chosen and told == "2 ranks: 2 tensor x 1 pipeline x 1 data"


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"requires a multiple of 4 processes, but this run has 6"):
        check_program(["pretrain_gpt.py", *FLAGS, "--tensor-model-parallel-size", "4"], 6)
    with pytest.raises(ConfigError, match=r"8 is not a multiple of --micro-batch-size 2 x 3 data-parallel"):
        check_program(["pretrain_gpt.py", *FLAGS], 3)
    with pytest.raises(ConfigError) as caught:
        check_program(["pretrain_gpt.py", *FLAGS, "--no-such-flag", "1", "--lr", "-1"], 2)
    assert len(caught.value.problems) == 2


def test_a_program_of_other_flags_is_not_checked() -> None:
    assert check_program(["mine.py", "--what"], 3) == [
        "mine.py is not checked before it starts: its flags are unknown here"
    ]
