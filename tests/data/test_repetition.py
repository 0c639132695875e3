"""Data that are smaller than a sample or repeated very often are worth a sentence; other data are not."""

from pathlib import Path

import pytest

from megatron.data.build import repetition_notices, source_usages
from tests.data.corpora import write_corpus
from tests.data.datasets.token_datasets import SEQUENCE_LENGTH, build, config


@pytest.mark.parametrize(
    ("tokens", "samples", "words"),
    [
        (
            SEQUENCE_LENGTH,
            51,
            ["has {tokens} tokens, which do not fill one sample of --seq-length", "repeated 51 times"],
        ),
        (10 * SEQUENCE_LENGTH + 1, 200, ["the {tokens} tokens of the training data", "repeated 20 times in this run"]),
        (10 * SEQUENCE_LENGTH + 1, 100, []),
        (SEQUENCE_LENGTH + 1, 1, []),
    ],
)
def test_passes_over_small_data(tmp_path: Path, tokens: int, samples: int, words: list[str]) -> None:
    datasets, plan = build(config(write_corpus(tmp_path / "corpus", [tokens]), split="1,0,0"), (samples, 0, 0))
    found = list(repetition_notices(source_usages(plan.train, datasets.train, SEQUENCE_LENGTH), SEQUENCE_LENGTH))
    assert len(found) == bool(words)
    for part in words:
        assert part.format(tokens=tokens) in found[0]


def test_each_source_of_a_blend_is_counted_by_itself(tmp_path: Path) -> None:
    large = write_corpus(tmp_path / "large", [10 * SEQUENCE_LENGTH] * 20)
    small = write_corpus(tmp_path / "small", [2 * SEQUENCE_LENGTH + 1])
    datasets, plan = build(config("1", large, "1", small, split="1,0,0"), (100, 0, 0))
    (found,) = repetition_notices(source_usages(plan.train, datasets.train, SEQUENCE_LENGTH), SEQUENCE_LENGTH)
    assert f"training data {small} are repeated 24 times" in found
