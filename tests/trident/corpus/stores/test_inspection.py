"""Wrong numbering is reported; reads are timed, samples drawn and lengths counted."""

from __future__ import annotations

import io
import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from megatron.data.stores.address import StoreAddress
from megatron.data.stores.document_store import open_backend, open_store
from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.data.databases import Database, numbered
from tests.helpers.vocabulary import write_vocabulary
from tests.trident.corpus.stores.imports import jsonl, problems_of, put
from trident.corpus.stores import inspection as store
from trident.corpus.stores.inspection import audit, fetch_samples, length_histogram, stream_samples, time_fetches


def test_gaps_and_duplicates_are_reported_by_number(database: Database) -> None:
    numbers = [0, 1, 4, 5, 5, 5, 9, 9]
    database.write({"web": [(number, "x") for number in numbers], "good": numbered(["x"])}, index="plain")
    assert problems_of(database, "web", "good") == {
        "web": ["5 missing: idx 2-3, 6-8", "3 duplicates: idx 5, 9"],
        "good": [],
    }


def test_what_meta_info_counts_is_audited(database: Database) -> None:
    database.write({"web": numbered(["x"] * 4), "news": numbered(["x"] * 2)}, counted={"web": 6, "news": 1})
    found = problems_of(database)
    assert found["web"] == ["2 missing: idx 4-5"]
    assert found["news"][0].startswith("1 indices beyond the 1 documents that meta_info counts")


def test_long_lists_of_numbers_are_truncated(sqlite_database: Database) -> None:
    sqlite_database.write({"web": [(number, "x") for number in range(0, 100, 2)]})
    found = audit(open_backend(StoreAddress.of(sqlite_database.base)), ["web"])[0]
    assert found.hole_count == 49 and len(found.holes) == 20 and found.problems[0].endswith("39, ...")


def test_tables_without_numbers_are_audited(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("CREATE TABLE plain (text TEXT)")
    connection.execute("CREATE TABLE keyed (name TEXT PRIMARY KEY, text TEXT) WITHOUT ROWID")
    connection.execute("CREATE TABLE nulls (idx INTEGER, text TEXT)")
    connection.executemany("INSERT INTO plain VALUES (?)", [("a",), ("b",), ("c",)])
    connection.execute("DELETE FROM plain WHERE text = 'b'")
    connection.execute("INSERT INTO keyed VALUES ('k', 'x')")
    connection.executemany("INSERT INTO nulls VALUES (?, 'x')", [(0,), (None,)])
    connection.commit()
    found = {one.name: one.problems for one in audit(open_backend(StoreAddress.of(f"sqlite:///{tmp_path}/a.db")))}
    assert found == {
        "plain": ["1 missing: idx 1"],
        "keyed": ["1 documents without an idx"],
        "nulls": ["1 documents without an idx"],
    }


def test_fetches_are_timed(database: Database) -> None:
    database.write({"web": numbered(["abc"] * 5)})
    found = time_fetches(database.address("web"), 20, seed=1)
    assert found["documents"] == 5 and found["fetches"] == 20 and found["mean_characters"] == 3
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"] and found["peak_rss_mb"] > 1
    assert "secret" not in json.dumps(found)


def test_an_empty_store_cannot_be_timed(database: Database) -> None:
    database.write({"web": []}, counted={"web": 0})
    with pytest.raises(ConfigError, match="holds no documents. Import"):
        time_fetches(database.address("web"), 1, seed=1)


@pytest.mark.parametrize("processes", [1, 2])
def test_samples_are_drawn_into_one_file_per_process(sqlite_database: Database, tmp_path: Path, processes: int) -> None:
    texts = [f"text {number}" for number in range(30)]
    sqlite_database.write({"web": numbered(texts[:20]), "news": numbered(texts[20:])})
    prefix = str(tmp_path / "part")
    written = fetch_samples(sqlite_database.base, 21, processes, prefix, "\n", seed=5)
    assert [path for path, _ in written] == [f"{prefix}{number}.txt" for number in range(processes)]
    lines = [Path(path).read_text().splitlines() for path, _ in written]
    assert [len(one) for one in lines] == [count for _, count in written] and sum(map(len, lines)) == 21
    drawn = {line for one in lines for line in one}
    assert len(drawn) == 21 and drawn < set(texts)
    fetch_samples(sqlite_database.base, 21, 1, f"{prefix}-again", "\n", seed=5)
    assert set(Path(f"{prefix}-again0.txt").read_text().splitlines()) == drawn
    with pytest.raises(ConfigError, match="--nsample 31 exceeds the 30 documents"):
        fetch_samples(sqlite_database.base, 31, 1, prefix, "\n", seed=5)


def test_samples_are_streamed_as_lines_of_json(sqlite_database: Database) -> None:
    texts = ["one\ntwo", "ğ three", "four"]
    sqlite_database.write({"web": numbered(texts)})
    written = io.BytesIO()
    stream_samples(sqlite_database.base, 3, 5, written)
    assert [json.loads(line)["text"] for line in written.getvalue().splitlines()] == texts
    with pytest.raises(ConfigError, match="--nsample 4 exceeds the 3 documents"):
        stream_samples(sqlite_database.base, 4, 5, written)


def test_a_process_that_is_killed_while_it_draws(
    sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(ThreadPoolExecutor):
        def __init__(self, processes: int, context: Any) -> None:
            super().__init__(processes)

        def submit(self, *given: Any, **options: Any) -> Any:
            raise BrokenProcessPool("killed")

    sqlite_database.write({"web": numbered(["a", "b"])})
    monkeypatch.setattr(store, "ProcessPoolExecutor", Broken)
    with pytest.raises(StorageError, match=r"part<i>\.txt was killed .*fewer processes than --num-process 2"):
        fetch_samples(sqlite_database.base, 2, 2, str(tmp_path / "part"), "\n", seed=1)


def test_a_failing_sampling_process_is_reported(sqlite_database: Database, tmp_path: Path) -> None:
    sqlite_database.write({"web": numbered(["a", None, "b"])})
    with pytest.raises(DataError, match="idx 1: filt_text is null"):
        fetch_samples(sqlite_database.base, 3, 2, str(tmp_path / "part"), "\n", seed=1)


def test_every_document_is_in_one_bin(sqlite_database: Database, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write_vocabulary(tmp_path, 300))
    texts = ["".join(chr(97 + (number * 7 + place) % 26) for place in range(number % 40)) for number in range(1, 1500)]
    put(sqlite_database, "web", jsonl(tmp_path / "a.jsonl", [text or "x" for text in texts]))
    lengths = [len(tokenizer.encode_flat([text or "x"])[0]) for text in texts]
    found = length_histogram(open_store(sqlite_database.address("web")), tokenizer, 5, 20)
    assert found.counts[:4] == tuple(sum(low <= one < low + 5 for one in lengths) for low in (0, 5, 10, 15))
    assert found.counts[4] == sum(one >= 20 for one in lengths) > 0
    assert (found.documents, found.tokens, found.longest) == (len(texts), sum(lengths), max(lengths))


def test_an_empty_store_is_refused(sqlite_database: Database, tmp_path: Path) -> None:
    put(sqlite_database, "web", jsonl(tmp_path / "a.jsonl", []))
    with pytest.raises(DataError, match="holds no documents to count"):
        length_histogram(
            open_store(sqlite_database.address("web")), build_tokenizer(write_vocabulary(tmp_path, 300)), 1, 1
        )
