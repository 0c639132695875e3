"""Scenario 000.2: fetching documents at random, and the memory that takes. Times are recorded, not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron.data.stores.address import StoreAddress
from megatron.data.stores.backend import ImportRecord
from tests.seeds.dsgpt2.example import ROOT
from trident.corpus.stores.writers import open_writer

LEAST, MOST = 1_000, 100_000
MOST_DIFFERENCE_MB = 20


def filled(path: Path, documents: int) -> str:
    """The address of a store with a number of short documents."""
    address = f"sqlite:///{path}"
    writer = open_writer(StoreAddress.of(address), "web")
    writer.begin()
    writer.append([f"document {number} of a corpus of short texts" for number in range(documents)], None)
    writer.commit(ImportRecord("web", "made.jsonl", "0" * 32, "text", 0, documents))
    writer.close()
    return address


def bench(address: str) -> dict[str, Any]:
    """What the command prints, in a process of its own: its peak memory counts."""
    command = [
        sys.executable,
        str(ROOT / "tools" / "corpus" / "corpus_store.py"),
        "bench",
        "--config",
        address,
        "--n",
        "5000",
    ]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout))


def test_000_2_memory_of_fetching_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    small, large = (bench(filled(tmp_path / f"{count}.db", count)) for count in (LEAST, MOST))
    assert (small["documents"], large["documents"]) == (LEAST, MOST)
    assert (tmp_path / f"{MOST}.db").stat().st_size > 5e6
    assert 10 < small["peak_rss_mb"] < 150, "of the command itself, not of the process that started it"
    assert abs(large["peak_rss_mb"] - small["peak_rss_mb"]) < MOST_DIFFERENCE_MB
    for found in (small, large):
        assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
