"""Node commands keep every character of their arguments; the choice of hosts."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError, LaunchError
from trident.launch.hostfile import Host
from trident.launch.plan import Plan, choose_devices, choose_hosts, passed_environment, slurm_hosts

AWKWARD = ["a b", "$HOME", "it's", '"x"', "`id`", "*", "; exit 3", "back\\slash", "two\nlines", "", "ü", "#", "!x"]


def plan_of(folder: Path, words: tuple[str, ...] = ("p.py",), **environment: str) -> Plan:
    launcher = folder / "launch me.py"
    launcher.write_text("import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))")
    hosts = (Host("node003"), Host("me@node011"))
    return Plan(hosts, 4, str(launcher), sys.executable, str(folder), words, environment, "node003", 1234)


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_shell_on_the_host_reads_every_argument_unchanged(tmp_path: Path, shell: str) -> None:
    folder = tmp_path / "a folder; 'quoted'"
    folder.mkdir()
    plan = plan_of(folder, ("p.py", *AWKWARD), VALUE="; $(id) 'x' \n")
    *front, text = plan.ssh_command(1)
    assert front[0] == "ssh" and front[-2:] == ["--", "me@node011"] and "BatchMode=yes" in front
    done = subprocess.run(
        [shell, "-c", text], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    words, environment, where = json.loads(done.stdout)
    assert words[words.index("--") + 1 :] == ["p.py", *AWKWARD]
    assert environment["VALUE"] == "; $(id) 'x' \n" and where == str(folder)
    assert " ".join(words[: words.index("--")]) == (
        "--local --nodes 2 --node-rank 1 --devices-per-node 4 --master-address node003 --master-port 1234 "
        "--settle-seconds 10 --grace-seconds 30 --skip-check --follow-input"
    )


def test_srun_starts_one_launcher_on_every_node(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ("p.py", "a b"))
    command = plan.srun_command()
    assert command[:5] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=node003,me@node011"]
    assert "--node-rank" not in command and command[-2:] == ["p.py", "a b"] and "--export=ALL" in command
    assert plan.port_command(by_slurm=True)[:2] == ["srun", "--nodes=1"]
    assert shlex.split(plan.port_command(by_slurm=False)[-1])[:2] == [sys.executable, "-c"]


def test_the_environment_that_hosts_get() -> None:
    here = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "s", "HF_HOME": "/x", "PATH": "/bin", "OMP_NUM_THREADS": "2", "MINE": "1"}
    assert passed_environment(here) == {"NCCL_DEBUG": "INFO", "HF_HOME": "/x", "OMP_NUM_THREADS": "2"}
    assert passed_environment(here, ["MINE", "HF_TOKEN", "A=b=c", "OMP_NUM_THREADS=1", "E="]) == {
        "NCCL_DEBUG": "INFO", "HF_HOME": "/x", "OMP_NUM_THREADS": "1", "MINE": "1", "HF_TOKEN": "s", "A": "b=c",
        "E": "",
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        passed_environment(here, ["1=2", "MISSING"])
    assert caught.value.problems == [
        "--env 1=2 is not a variable. It must look like NAME or NAME=VALUE.",
        "--env MISSING: MISSING is not set here. Set it, or give --env MISSING=VALUE.",
    ]


def test_hosts_and_devices() -> None:
    hosts = [Host("a", 8), Host("b", 8), Host("c", 4)]
    assert choose_hosts(hosts, None, "x") == tuple(hosts) and choose_hosts(hosts, 2, "x") == tuple(hosts[:2])
    with pytest.raises(
        LaunchError, match=r"--nodes 4 requires 4 hosts, and --ssh f names 3 \(a, b, c\)\. Use --nodes 3"
    ):
        choose_hosts(hosts, 4, "--ssh f")
    assert (
        choose_devices(hosts[:2], None) == 8
        and choose_devices(hosts, 4) == 4
        and choose_devices([Host("a")], None) == 1
    )
    with pytest.raises(LaunchError, match=r"different numbers of slots \(a 8, b 8, c 4\).*--devices-per-node 4"):
        choose_devices(hosts, None)
    with pytest.raises(LaunchError, match=r"--devices-per-node 6 is more than the 4 slots of c\. Use 4"):
        choose_devices(hosts, 6)


def test_hosts_of_a_slurm_job() -> None:
    found = slurm_hosts({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "4"})
    assert found == [Host("n1", 4), Host("n2", 4)]
    with pytest.raises(
        LaunchError, match="--slurm requires a surrounding Slurm job, and SLURM_JOB_NODELIST is not set"
    ):
        slurm_hosts({})
