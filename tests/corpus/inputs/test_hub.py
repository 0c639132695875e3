"""Rows of the datasets library in blocks; a missing or failing library is a one-sentence error."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from megatron.corpus.inputs.block import parse_block
from megatron.corpus.inputs.hub_rows import datasets_library, row_blocks
from megatron.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets", reason="data sets need the datasets package")


def test_rows_come_in_order() -> None:
    texts = [f"text {number}" for number in range(3000)]
    blocks = list(row_blocks(datasets.Dataset.from_dict({"text": texts}), "some", 20000))
    assert len(blocks) == 2 and blocks[1].start == blocks[0].size and blocks[0].source == "some"
    assert [text for block in blocks for text in parse_block(block, ["text"], skip_bad=False).texts[0]] == texts


def test_failures_are_one_sentence_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def with_format(self, name: str) -> Any:
            return self

        def iter(self, batch_size: int) -> Any:
            raise OSError("disk error")
            yield

    with pytest.raises(DataError, match="some: rows from 0 on cannot be read: disk error"):
        list(row_blocks(Broken(), "some", 1000))

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="--input x needs the datasets package"):
        datasets_library("--input x")
