"""Scenario 003.3: HelloDeepSpeed's train_bert_ds.py on two ranks, against plain PyTorch; test_003_5.py launches it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.seeds.hello_deepspeed.runs import experiments, run_beside, steps, train_plainly, write_text

RATE = 1.0e-3


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
