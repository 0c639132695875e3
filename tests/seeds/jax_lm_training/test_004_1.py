"""Scenario 004.1: texts become windows in Parquet shards that any reader opens, and no token is lost."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from megatron.data.formats.parquet_windows import WindowFile
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.programs import forking_python
from tests.helpers.projects.jax_lm_page import PageRun

pytestmark = pytest.mark.xdist_group("jax-lm-training")  # one worker, so that the page is executed once
BEFORE, STRIDE = 1, 15  # special tokens before a window's text; tokens between the beginnings of windows
TYPES = {"input_ids": "int64", "attention_mask": "float32", "labels": "int64"}


def test_004_1_windows_hold_every_token(jax_lm: PageRun) -> None:
    path = jax_lm.folder / "dataset" / "wikitext.train-00000-of-00001"
    tokenizer = build_tokenizer(
        TokenizerChoice("HFTokenizer", tokenizer_name_or_path=str(jax_lm.folder / "data" / "tr-tokenizer.json"))
    )
    lines = (jax_lm.folder / "data" / "train.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    rows = Dataset.from_parquet(f"{path.parent}/wikitext.train*", cache_dir=str(jax_lm.folder / "cache"))
    assert {name: feature.feature.dtype for name, feature in rows.features.items()} == TYPES
    with WindowFile(path) as file:
        windows = next(file.batches(1000, group=0))
    assert windows.input_ids.tolist() == list(rows["input_ids"])
    ids, kept = windows.input_ids, windows.attention_mask == 1
    assert ((windows.labels == ids) == kept).all() and (windows.labels[~kept] == -100).all()
    row = 0
    for text in texts:
        wanted = tokenizer.encode(text)
        found: list[int] = []
        while len(found) < len(wanted):
            part = ids[row][kept[row]][BEFORE:-1].tolist()
            begin = row_begin(len(found), found, part)
            found = found[:begin] + part
            row += 1
        assert found == wanted
    assert row == len(ids)
    exclamations = sum(tokenizer.encode(text).count(0) for text in texts)
    assert tokenizer.decode([0]) == "!" and exclamations >= len(texts)
    assert (ids[kept] == 0).sum() >= exclamations
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    assert f"Read {len(texts)} documents with {tokens} tokens; 0 empty documents and 0 bad lines" in jax_lm.err
    assert f"Wrote {len(ids)} windows of 32 positions: {tokens} tokens, " in jax_lm.err
    assert "Dropped 0 tokens" in jax_lm.err


def row_begin(length: int, found: list[int], part: list[int]) -> int:
    """Where a window's text begins in its document: a stride after the one before, with which it overlaps."""
    if not found:
        return 0
    starts = [start for start in range(0, length, STRIDE) if found[start:] == part[: length - start]]
    return starts[-1]


def test_one_worker_writes_the_same_bytes(jax_lm: PageRun) -> None:
    line = (
        "tools/corpus/featurize.py --tokenizer-model data/tr-tokenizer.json --input data/train.jsonl "
        "--min-sequence-length 8 --max-sequence-length 32 --num-special-token-reserved 2 --ignore-label -100 --stride "
        "15 --output-path one/wikitext.train --num-workers 1"
    )
    subprocess.run([forking_python(), *line.split()], cwd=jax_lm.folder, check=True, capture_output=True, timeout=120)
    one, two = (Path(jax_lm.folder, folder, "wikitext.train-00000-of-00001") for folder in ("one", "dataset"))
    assert one.read_bytes() == two.read_bytes()
    assert np.frombuffer(two.read_bytes()[:4], np.uint8).tobytes() == b"PAR1"
