"""What the run reads."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config import DataConfig, DocumentConfig, RandomConfig
from megatron.config.flags.fields import RUN_MUST_MATCH, resume_rule
from megatron.errors import ConfigError


def test_prefixes_of_a_split_are_a_group_of_whole_files() -> None:
    data = DataConfig(seq_length=8, train_data_path=("3", "a", "1", "b"), valid_data_path=("c",))
    (train,), (valid,) = data.train_groups, data.valid_groups
    assert [(entry.weight, entry.start, entry.stop, entry.prefix) for entry in train.entries] == [
        (3, 0, 1, "a"),
        (1, 0, 1, "b"),
    ]
    assert (train.name, valid.name, data.test_groups) == ("train", "valid", ())


def test_all_unreadable_paths_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig(seq_length=0, split="a", data_path=("1", "a", "2"), train_weighted_split_paths=("x",))
    assert [text.split()[0] for text in caught.value.problems] == [
        "--seq-length", "--split", "--data-path", "--train-weighted-split-paths",
    ]  # fmt: skip


def test_training_reads_one_group() -> None:
    with pytest.raises(ConfigError, match="--train-weighted-split-paths has 2 groups"):
        DataConfig(seq_length=8, train_weighted_split_paths=("A: 1 0:1 a", "B: 1 0:1 b"))


@pytest.mark.parametrize(
    ("flags", "needed"),
    [({}, False), ({"eod_mask_loss": True}, False), ({"reset_position_ids": True}, True)]
    + [({"reset_attention_mask": True}, True)],
)
def test_when_the_network_needs_segments(flags: dict[str, bool], needed: bool) -> None:
    assert DocumentConfig(**flags).needs_segments is needed


def test_a_resume_keeps_all_document_settings() -> None:
    assert {resume_rule(field) for field in dataclasses.fields(DocumentConfig)} == {RUN_MUST_MATCH}


def test_the_seed_is_upstreams_unless_given() -> None:
    assert RandomConfig().seed == 1234


def test_a_seed_is_positive() -> None:
    with pytest.raises(ConfigError, match=r"--seed 0 is out of range\. It must be at least 1\."):
        RandomConfig(seed=0)
