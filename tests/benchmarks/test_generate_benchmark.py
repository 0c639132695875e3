"""The benchmark of generation compares like with like: both sides give the same texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import generate
from benchmarks.generate import GenerateFlags, Work


def test_both_sides_do_the_same_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded, reference = generate.make_networks(tmp_path, "llama", "tiny")
    work = Work("two requests", ((1, 2, 3), (4,) * 40), (3, 5))
    ours, theirs = generate.run_ours(loaded, work), generate.run_transformers(reference, work)
    assert ours.texts == theirs.texts and [len(text) for text in ours.texts] == [3, 5]
    token_bytes = 2 * 2 * 64 * 4  # layers, keys and values, channels, float32
    assert ours.cache_bytes == (32 + 64) * token_bytes  # blocks of 32 tokens
    assert theirs.cache_bytes == 2 * (40 + 4) * token_bytes
    capsys.readouterr()
    generate.measure("llama tiny", loaded, reference, work, GenerateFlags(repeats=1))
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"speed_ratio", "equal_texts", "tokens_per_second", "cache"} <= {figure["figure"] for figure in figures}
