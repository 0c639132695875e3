"""Scenario 004.3: windows in Parquet files and Megatron's token files become each other without a loss."""

from __future__ import annotations

import json

import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.parquet_windows import WindowFile
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.projects.jax_lm_page import PageRun

pytestmark = pytest.mark.xdist_group("jax-lm-training")  # one worker, so that the page is executed once


def test_004_3_parquet_and_token_files(jax_lm: PageRun) -> None:
    folder = jax_lm.folder
    tokenizer = build_tokenizer(
        TokenizerChoice("HFTokenizer", tokenizer_name_or_path=str(folder / "data" / "tr-tokenizer.json"))
    )
    texts = [json.loads(line)["text"] for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    documents = IndexedDataset(str(folder / "data" / "train_text_document"))
    assert [documents[number].tolist() for number in range(len(documents))] == [tokenizer.encode(one) for one in texts]
    for ending in ("bin", "idx"):
        first, again = (folder / "data" / f"{name}_text_document.{ending}" for name in ("train", "again"))
        assert first.read_bytes() == again.read_bytes()
    with (
        WindowFile(folder / "dataset" / "wikitext.train-00000-of-00001") as first_windows,
        WindowFile(folder / "dataset" / "again.train-00000-of-00001") as again_windows,
    ):
        before, after = next(first_windows.batches(1000, group=0)), next(again_windows.batches(1000, group=0))
        assert first_windows.facts == again_windows.facts
    for column in ("input_ids", "attention_mask", "labels"):
        assert (getattr(before, column) == getattr(after, column)).all()
