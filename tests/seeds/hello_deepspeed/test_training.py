"""train_bert.py: an experiment folder and an exact resume."""

from __future__ import annotations

import json
import re
from statistics import mean

import pytest
import torch

from tests.seeds.hello_deepspeed.runs import Alone, newest, steps

pytestmark = pytest.mark.xdist_group("HelloDeepSpeed")  # one worker, so that the runs happen once


def test_003_1_experiment_folder_and_a_falling_loss(hello_alone: Alone) -> None:
    folder = hello_alone.long
    assert re.fullmatch(r"bert_pretrain\.\d{4}(\.\d\d){5}\.[0-9a-f]{8}", folder.name)
    assert {"hparams.json", "githash.log", "gitdiff.log", "tb_dir", "checkpoints"} <= {p.name for p in folder.iterdir()}
    assert json.loads((folder / "hparams.json").read_text())["h_dim"] == 32
    assert list((folder / "tb_dir").glob("events.*"))
    losses = [float(text) for text in re.findall(r"^Loss: (\d+\.\d{4})$", hello_alone.output, flags=re.M)]
    assert len(losses) == 200
    assert mean(losses[-20:]) < mean(losses[:20]) - 1.0


def test_003_2_iterations_and_exact_resume(hello_alone: Alone) -> None:
    assert hello_alone.five_steps == (2, 4, 5)
    resumed, resumed_tensors = newest(hello_alone.five)
    straight, straight_tensors = newest(hello_alone.ten)
    assert resumed["progress"] == straight["progress"]
    assert resumed["optimizer_updates"] == straight["optimizer_updates"] == resumed["progress"]["step"] == 10
    assert resumed_tensors.keys() == straight_tensors.keys()
    assert all(torch.equal(values, straight_tensors[name]) for name, values in resumed_tensors.items())


def test_a_continued_experiment_stays_in_its_folder(hello_alone: Alone) -> None:
    assert steps(hello_alone.five) == (2, 4, 5, 6, 8, 10)
    assert (hello_alone.five / "hparams.1.json").is_file()
