"""Two hosts without a scheduler: each is told its place, or torchrun's rendezvous finds it; one is switched off."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.machines.cluster import HOSTS, Cluster
from tests.helpers.tiny_run import TinyCorpus, losses

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.slow]

STEPS = 60
FIRST, SECOND = HOSTS
TORCHRUN = [
    "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3",
    "--rdzv-backend=c10d", f"--rdzv-endpoint={FIRST}:29400", "--rdzv-id=run", "--rdzv-conf",
    "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=10",
]  # fmt: skip


# torchrun begins with one host if the other is late, and starts again when that comes. Nothing is trained before, and
# slowly while the other is away.
GATE = """
import os, pathlib, runpy, sys, time
met = pathlib.Path("four_ranks_met")
if os.environ["WORLD_SIZE"] == "4":
    met.touch()
while not met.exists():
    time.sleep(0.05)
if os.environ["WORLD_SIZE"] == "2":
    from megatron.train import loop
    real = loop.train_step
    loop.train_step = lambda run: time.sleep(1.5) or real(run)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def command(corpus: TinyCorpus, folder: Path, *more: str) -> list[str]:
    """The program and its flags."""
    return [
        "pretrain_gpt.py",
        *corpus.flags(*more, folder=folder, train_iters=STEPS, save_interval=3, attention_dropout=0, eval_iters=0),
    ]


def wait_until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "waited too long"
        time.sleep(0.05)


def world_sizes(folder: Path) -> list[int]:
    """The number of ranks of each start of a run, in their order; none before it has logged a step."""
    run = folder / "run"
    if not (run / "metrics.jsonl").exists():
        return []
    earlier = sorted(run.glob("config.*.json"), key=lambda path: int(path.name.split(".")[1]))
    try:  # a start renames what the one before has written
        return [json.loads(path.read_text())["parallel"]["world_size"] for path in (*earlier, run / "config.json")]
    except FileNotFoundError:
        return []


def uninterrupted(hosts: Cluster, corpus: TinyCorpus, project: Path) -> dict[int, float]:
    """Losses of a run on one rank of each host: one started by hand, the other by the launcher."""
    program = command(corpus, project / "whole")
    variables = {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": FIRST, "MASTER_PORT": "29511",
    }  # fmt: skip
    launcher = [hosts.python, "tools/launch.py", "--local", "--nodes", "2", "--node-rank", "1"]
    launcher += ["--master-address", FIRST, "--master-port", "29511", "--", *program]
    logs = [project / "by_hand.log", project / "launched.log"]
    started = [
        hosts.start(FIRST, [hosts.python, *program], variables, output=logs[0]),
        hosts.start(SECOND, launcher, output=logs[1]),
    ]
    codes = [process.wait(timeout=300) for process in started]
    assert codes == [0, 0], "".join(log.read_text() for log in logs)
    return losses(project / "whole")


@pytest.mark.full
def test_a_run_that_loses_a_host_goes_on_and_regains_it(hosts: Cluster, project: Path, corpus: TinyCorpus) -> None:
    expected = uninterrupted(hosts, corpus, project)
    run, layout = project / "elastic", ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    (project / "gate.py").write_text(GATE)
    program = [sys.executable, *TORCHRUN, "--no-python", hosts.python, "gate.py"]
    program += command(corpus, run, *layout, "--elastic")
    logs = {host: project / f"{host}.log" for host in HOSTS}
    # Else the agent of a host that stayed does not tell one that comes back where the ranks meet.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = {host: hosts.start(host, program, variables, output=logs[host]) for host in HOSTS}

    wait_until(lambda: world_sizes(run)[-1:] == [4] and max(losses(run), default=0) >= 4, logs[FIRST])
    hosts.power_off(SECOND)
    agents[SECOND].wait(timeout=120)
    wait_until(lambda: world_sizes(run)[-1:] == [2], logs[FIRST])
    hosts.power_on(SECOND)
    agents[SECOND] = hosts.start(SECOND, program, variables, output=logs[SECOND])
    assert [agents[host].wait(timeout=300) for host in HOSTS] == [0, 0], logs[FIRST].read_text()

    output = logs[FIRST].read_text()
    assert (
        "2 tensor x 2 pipeline ranks do not fit 2 processes; using 2 x 1 x 1 data: it keeps the tensor size" in output
    )
    assert world_sizes(run)[-3:] == [4, 2, 4]
    assert losses(run) == pytest.approx(expected, rel=1e-4)
    assert sorted(expected) == list(range(1, STEPS + 1))
