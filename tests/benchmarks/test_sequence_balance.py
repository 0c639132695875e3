"""Packed conversations are divided over the ranks of a ring within a tenth of equal work, by the benchmark's count."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sequence_balance
from tests.helpers.tiny_run import write_tiny_corpus


def test_rows_of_packed_conversations_are_shared_evenly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_tiny_corpus(tmp_path)
    lengths = np.random.default_rng(2).lognormal(3.5, 1.0, 300).astype(int) + 1
    lines = [{"prompt": "what is it?", "answer": " a" * length} for length in lengths.tolist()]
    examples = tmp_path / "chat.jsonl"
    examples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--data-path", str(examples), "--vocab-file", corpus.vocab_file, "--merge-file", corpus.merge_file]
    assert sequence_balance.main([*words, "--seq-length", "1024", "--ranks", "2", "4"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    worst = {record["ranks"]: record["value"] for record in records if record["figure"] == "costliest_rank_worst"}
    assert all(record["documents"] > 5 * record["samples"] > 20 for record in records)
    assert worst.keys() == {2, 4} and max(worst.values()) < 1.1
