"""Random ids instead of data."""

import dataclasses

import numpy as np
import pytest

from megatron.config import DataConfig
from megatron.data.build import build_split_datasets, check_sources, data_fingerprint
from megatron.data.sources.source import DataRequest, SourceUse
from megatron.data.sources.source_kinds import RANDOM_ROWS, RandomRows
from megatron.errors import ConfigError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer


def test_a_row_follows_from_the_seed_and_its_number() -> None:
    rows = RandomRows("mock:", 600, 16, 7)
    (tokens,) = rows.read(np.array([5, 99_999, 5]))
    assert tokens.shape == (3, 17) and 0 <= tokens.min() <= tokens.max() < 600
    assert (tokens[0] == tokens[2]).all() and (tokens[0] != tokens[1]).any()
    assert tokens[0, :4].tolist() == [444, 502, 576, 83]  # whatever NumPy's version
    assert (RandomRows("mock:", 600, 16, 8).read(np.array([5]))[0] != tokens[:1]).any()
    assert RandomRows("mock:", 600, 16, 8).fingerprint != rows.fingerprint
    assert rows.locate(5, 2) == "mock: token 2 of random row 5"


def test_every_split_has_rows_of_its_own() -> None:
    tokenizer = build_tokenizer(TokenizerChoice("NullTokenizer", tokenizer_name_or_path="99"))
    data = DataConfig(seq_length=8, data_path=("mock:",), split="90,8,2")
    request = DataRequest(data, 8, 1234, (20, 10, 5), tokenizer=tokenizer)
    check_sources(data, SourceUse(8))
    datasets, plan = build_split_datasets(request)
    parts = [plan.train, *plan.valid, *plan.test]
    assert [(part.sources[0].first, part.sources[0].last) for part in parts] == [
        (0, 90_000), (90_000, 98_000), (98_000, RANDOM_ROWS),
    ]  # fmt: skip
    again, _ = build_split_datasets(request)
    for one, other in ((datasets.train, again.train), (datasets.test["test"], again.test["test"])):
        assert np.array_equal(one[3], other[3])
    assert data_fingerprint(data) == {"mock:": {"random_rows": RANDOM_ROWS}}
    with pytest.raises(ConfigError, match=r"--mock-data draws ids of a tokenizer \(--tokenizer-type\)"):
        build_split_datasets(dataclasses.replace(request, tokenizer=None))
