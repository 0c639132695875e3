"""Scenario 001.5: every launcher of the README starts the same run, and each start goes on where the last one ended.

`tests/parallel/test_launching.py` has torchrun, srun, mpirun and the death of a launcher.
"""

from __future__ import annotations

import re

import pytest

from megatron.observe.metrics_file import read_steps
from tests.seeds.turkish_gpt2.guide import Guide

pytestmark = [pytest.mark.xdist_group("turkish"), pytest.mark.slow]


def test_001_5_launchers_and_the_address_of_a_slurm_job(turkish: Guide) -> None:
    runs = sorted((turkish.folder / "runs").iterdir())
    steps = [step for run in runs for step in read_steps(run)]
    assert steps == [1, 2, 3, 4, 5, 6], "deepspeed, torch.distributed.launch under srun, variables set by hand"
    assert re.findall(r"resumed checkpoints/gpt2/iter_0+(\d): iteration \1", turkish.output) == ["2", "4"]
    assert "--master_addr node003 " in (turkish.folder / "srun.log").read_text()
    inside = turkish.output.rpartition("slurm\n")[2]
    assert "job 4711" in inside and "6 nodes, node003 to node011" in inside
    assert "node003, the node of rank 0" in inside
    assert "srun --nodes=6 --ntasks-per-node=4 python -u pretrain_gpt.py" in inside


def test_torchrun_and_plain_python_start_the_example(turkish: Guide) -> None:
    example = turkish.folder / "turkish-demo"
    assert sorted(read_steps(example / "run-pretrained")) == [1, 2, 3, 4]
    assert read_steps(example / "run-tuned")[1]["consumed_samples"] == 4, "fine-tuning begins anew"
