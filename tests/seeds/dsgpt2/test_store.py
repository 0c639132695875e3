"""A document store: import, statistics, damage, and the memory that fetching takes."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.data.stores.address import StoreAddress
from megatron.data.stores.backend import ImportRecord
from megatron.data.stores.document_store import open_store
from megatron.errors import ExitCode
from tests.seeds.dsgpt2.guide import ROOT
from tools.corpus import corpus_store
from trident.corpus.stores.writers import open_writer


def test_000_1_store_import_and_stat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, count in (("web", 30), ("news", 12)):
        lines = [json.dumps({"text": f"{name} {number}: çağ 안녕"}) + "\n" for number in range(count)]
        Path(f"{name}.jsonl").write_text("".join(lines))
    settings = {"MONGO_CONNECTION_STRING": "sqlite:///corpus.db", "MONGO_CONNECTION_DB": "corpus"}
    Path("db.json").write_text(json.dumps({**settings, "COLLECTIONS": ["web", "news"]}))

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["corpus_store.py", *words])
        code = corpus_store.main()
        return code, capsys.readouterr().out

    for name in ("web", "news", "web"):  # twice the same file
        assert run("import", f"{name}.jsonl", "--config", "db.json", "--collection", name)[0] == 0
    assert run("stat", "--config", "db.json") == (
        0,
        "web: 30 documents (numbers 0 to 29 of the store)\nnews: 12 documents (numbers 30 to 41 of the store)\n"
        "total: 42 documents\n",
    )
    store = open_store("db.json")
    assert store[30] == "news 0: çağ 안녕" and store[29] == "web 29: çağ 안녕"
    with sqlite3.connect("corpus.db") as connection:
        assert dict(connection.execute("SELECT collection_name, num_docs FROM meta_info")) == {"web": 30, "news": 12}
        connection.execute("DELETE FROM web WHERE idx = 17")
        connection.execute("DROP INDEX news_idx")
        connection.execute("UPDATE news SET idx = 3 WHERE idx = 4")
    code, shown = run("stat", "--config", "db.json")
    assert code == ExitCode.DATA
    assert "1 missing: idx 17\n" in shown
    assert "1 missing: idx 4\n" in shown and "1 duplicates: idx 3\n" in shown


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


@pytest.mark.full
def test_000_2_memory_of_fetching_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    small, large = (bench(filled(tmp_path / f"{count}.db", count)) for count in (LEAST, MOST))
    assert (small["documents"], large["documents"]) == (LEAST, MOST)
    assert (tmp_path / f"{MOST}.db").stat().st_size > 5e6
    assert 10 < small["peak_rss_mb"] < 150, "of the command itself, not of the process that started it"
    assert abs(large["peak_rss_mb"] - small["peak_rss_mb"]) < MOST_DIFFERENCE_MB
    for found in (small, large):
        assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
