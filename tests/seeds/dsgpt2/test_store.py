"""A document store: import, statistics and damage."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from megatron.data.stores.document_store import open_store
from megatron.errors import ExitCode
from tools.corpus import corpus_store


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
        code = corpus_store.main(words)
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
