"""Answers that are replaced by their prompts: which, how many, and that the rest stays as it was."""

import json
from pathlib import Path

import pytest

from megatron.config import DataConfig
from megatron.data.build import SplitDatasets, build_split_datasets
from megatron.data.datasets.changed_samples import is_copied
from megatron.data.datasets.examples.example_options import ExampleOptions
from megatron.data.sources.source import DataRequest
from megatron.tokenizers.tokenizer import Tokenizer, build_tokenizer
from tests.helpers.vocabulary import write_vocabulary

LENGTH, COUNT, SEED = 31, 40, 1234


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(write_vocabulary(tmp_path_factory.mktemp("vocabulary"), 400))


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Questions that are much longer than their answers, and another number in each."""
    records = [{"q": f"where in the {number}?", "a": f"{number}"} for number in range(COUNT)]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def build(path: str, tokenizer: Tokenizer, probability: float, split: str = "4,1,0") -> SplitDatasets:
    data = DataConfig(seq_length=LENGTH, data_path=(path,), split=split)
    options = ExampleOptions(on_targets_only=True, copy_prompt_probability=probability)
    return build_split_datasets(DataRequest(data, LENGTH, SEED, (96, 8, 0), tokenizer=tokenizer, examples=options))[0]


def test_drawn_samples_answer_with_their_prompts_and_no_other_sample_changes(path: str, tokenizer: Tokenizer) -> None:
    plain, mixed = build(path, tokenizer, 0.0), build(path, tokenizer, 0.5)
    again = build(path, tokenizer, 0.5)
    assert plain.train is not None and mixed.train is not None and again.train is not None
    copied = []
    for number in range(96):
        sample, original = mixed.train.read(number), plain.train.read(number)
        prompt, answer = tokenizer.decode(original.tokens.tolist()).partition("\n")[::2]
        assert (again.train.read(number).tokens == sample.tokens).all()
        assert sample.loss_mask is not None and original.loss_mask is not None
        counted = tokenizer.decode(sample.tokens[1:][sample.loss_mask].tolist())
        if is_copied(0.5, SEED, number):
            copied.append(number)
            assert tokenizer.decode(sample.tokens.tolist()).startswith(f"{prompt}\n{prompt}<|endoftext|>")
            assert counted == f"{prompt}<|endoftext|>"
        else:
            assert (sample.tokens == original.tokens).all() and (sample.loss_mask == original.loss_mask).all()
            assert answer.startswith(counted)
    assert 30 < len(copied) < 66
    first, second = ({number % 32 for number in copied if number // 32 == epoch} for epoch in (0, 1))
    assert first != second, "every epoch copies others"


def test_validation_is_never_changed(path: str, tokenizer: Tokenizer) -> None:
    plain, all_copied = build(path, tokenizer, 0.0), build(path, tokenizer, 1.0)
    for number in range(8):
        assert (plain.valid["valid"][number] == all_copied.valid["valid"][number]).all()
