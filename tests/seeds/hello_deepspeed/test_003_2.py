"""Scenario 003.2: how HelloDeepSpeed masks, counts its iterations, saves, and resumes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.config.objective.masking import DOCUMENTS, MaskingConfig
from megatron.data.datasets.masked.masking import mask_tokens, sample_numbers
from megatron.data.datasets.masked.vocabulary import MaskedVocabulary
from tests.seeds.hello_deepspeed.runs import Alone, newest, steps

pytestmark = pytest.mark.xdist_group("HelloDeepSpeed")  # one worker, so that the runs happen once

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
