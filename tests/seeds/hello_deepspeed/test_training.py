"""The two programs: an experiment folder, masking, an exact resume, and two ranks against plain PyTorch."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch

from megatron.config.objective.masking import DOCUMENTS, MaskingConfig
from megatron.data.datasets.masked.masking import mask_tokens, sample_numbers
from megatron.data.datasets.masked.vocabulary import MaskedVocabulary
from tests.helpers.ranks import run_ranks
from tests.seeds.hello_deepspeed.runs import Alone, experiments, newest, run_beside, steps, train_plainly, write_text

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


TOKENS, SAMPLES, ENTRIES = 512, 3000, 1000
BOS, PAD, EOS, MASK = 0, 1, 2, 4
TOLERANCE = 1.0e-3


@pytest.fixture(scope="module")
def vocabulary() -> MaskedVocabulary:
    """RoBERTa's special tokens, then words."""
    is_special = np.arange(ENTRIES) < 5
    return MaskedVocabulary(
        BOS, EOS, MASK, PAD, EOS, is_special, np.zeros(ENTRIES, np.bool_), np.flatnonzero(~is_special)
    )


@pytest.fixture(scope="module")
def counts(vocabulary: MaskedVocabulary) -> dict[str, float]:
    """Shares of the words that were hidden, shown as another word, and shown as they are."""
    rules = MaskingConfig(masked_samples=DOCUMENTS)
    text = np.random.default_rng(0).integers(5, ENTRIES, size=TOKENS)
    text[[0, TOKENS - 9]], text[TOKENS - 8 :] = (BOS, EOS), PAD
    words = ~vocabulary.is_special[text]
    found = {"hidden": 0, "mask": 0, "random": 0, "shown": 0}
    for sample in range(SAMPLES):
        numbers = sample_numbers(1234, sample, TOKENS)
        seen, hidden = mask_tokens(text, np.ones(TOKENS, np.bool_), TOKENS, rules, vocabulary, numbers)
        assert not hidden[~words].any() and (seen[~hidden] == text[~hidden]).all()
        found["hidden"] += int(hidden.sum())
        found["mask"] += int((seen[hidden] == MASK).sum())
        found["shown"] += int((seen[hidden] == text[hidden]).sum())
        found["random"] += int(((seen != text) & (seen != MASK)).sum())
    return {name: count / (SAMPLES * int(words.sum())) for name, count in found.items()}


def test_003_2_masking_iterations_and_exact_resume(counts: dict[str, float], hello_alone: Alone) -> None:
    assert counts["hidden"] == pytest.approx(0.15, abs=TOLERANCE)
    assert counts["mask"] == pytest.approx(0.15 * 0.8, abs=TOLERANCE)
    assert counts["random"] == pytest.approx(0.015, abs=TOLERANCE)
    assert counts["shown"] == pytest.approx(0.015, abs=TOLERANCE)
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
