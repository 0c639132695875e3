"""Scenario 003.3: HelloDeepSpeed's train_bert_ds.py on two ranks, against plain PyTorch and by its own launcher."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.programs import forking_python
from tests.helpers.ranks import free_port, run_ranks
from tests.seeds.hello_deepspeed import TINY, experiments, run_beside, steps, train_plainly, write_text

ROOT = Path(__file__).resolve().parents[2]
RATE = 1.0e-3
# Stands in for the program that binds a process to cores, of which the test needs only that it starts the process.
NUMACTL = r"""#!/bin/sh
if [ "$1" = --hardware ]; then printf 'available: 1 nodes (0)\nnode 0 cpus: 0 1\nnode distances:\n'; exit; fi
while [ "${1#-}" != "$1" ]; do shift 2; done
exec "$@"
"""


def test_003_3_two_ranks_equal_plain_pytorch(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    words = (
        f"--dtype fp32 --dataset {tmp_path / 'text.txt'} --dropout 0 --num_iterations 12 --checkpoint_every 12 "
        f"--lr {RATE} --activation-function gelu_tanh --batch_size 4"
    ).split()
    ranks = run_ranks(run_beside, 2, str(tmp_path / "experiments"), words)
    (experiment,) = experiments(tmp_path / "experiments")
    assert steps(experiment) == (12,)
    for first, second in zip(ranks[0].samples, ranks[1].samples, strict=True):
        assert set(first).isdisjoint(second)
    assert sorted(itertools.chain(*ranks[0].samples, *ranks[1].samples)) == list(range(12 * 8))
    assert not {tuple(row) for text in ranks[0].texts[:1] for row in text.labels.tolist()} & {
        tuple(row) for text in ranks[1].texts[:1] for row in text.labels.tolist()
    }
    assert ranks[0].losses == ranks[1].losses
    assert ranks[0].losses == pytest.approx(train_plainly(ranks, RATE), abs=1e-5)
    assert ranks[0].losses[-1] < ranks[0].losses[0] - 0.1


def test_the_command_of_hellodeepspeed_starts_bound_ranks(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    (tmp_path / "numactl").write_text(NUMACTL)
    (tmp_path / "numactl").chmod(0o755)
    launcher = [forking_python(), "-m", "deepspeed.launcher.runner", "--num_gpus", "2", f"--master_port={free_port()}"]
    own = ["--checkpoint_dir", ".", "--dataset", "text.txt", "--num_iterations", "2", "--dtype", "bf16", *TINY]
    finished = subprocess.run(
        [*launcher, "--bind_cores_to_rank", "--bind_core_list", "0-1", str(ROOT / "train_bert_ds.py"), *own],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "DS_ACCELERATOR": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-3000:]
    assert finished.stdout.count("Loss: ") == 2
    (experiment,) = experiments(tmp_path)
    assert steps(experiment) == (2,)
