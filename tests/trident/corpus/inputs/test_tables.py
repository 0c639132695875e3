"""Tables of databases and datasets as inputs: the same documents as from lines, in order, divided by rows."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megatron.data.formats.sidecar import read_sidecar
from megatron.data.stores import sqlite as sqlite_store
from megatron.data.stores.document_store import open_store
from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.data.databases import Database, new_database, numbered
from tests.helpers.architecture.budget import reached
from tests.trident.corpus.preprocess_runs import quiet
from trident.corpus.inputs.input_blocks import blocks, check_inputs, total_bytes
from trident.corpus.inputs.input_paths import InputPart, Shard, expand_inputs, share_of
from trident.corpus.inputs.lines import LONG_LINE_BYTES, parse_lines
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.partitions import divide, preprocess_in_parts
from trident.corpus.preprocess.preprocess_corpus import preprocess
from trident.corpus.stores import store_table
from trident.corpus.vocabulary.learning import texts_of

TEXTS = [f'text {number} ğüşİ 🙂 "quoted"\n' * (number % 7) for number in range(50)]


def read(*inputs: str | InputPart, keys: tuple[str, ...] = ("text",), block_bytes: int = 1000) -> list[Any]:
    """The texts of inputs, a list a key; one list for one key."""
    found: list[list[Any]] = [[] for _ in keys]
    paths = [one for entry in inputs for one in ([entry] if isinstance(entry, InputPart) else expand_inputs([entry]))]
    for block in blocks(paths, block_bytes, None, keys):
        parsed = parse_lines(block.read(), keys, block.start == 0, False)
        assert not parsed.bad and block.size == len(block.read())
        for texts, more in zip(found, parsed.texts, strict=True):
            texts += more
    return found if len(keys) > 1 else found[0]


def plain(path: Path, statement: str, rows: list[tuple[Any, ...]] = [], values: str = "?") -> str:  # noqa: B006
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.executemany(f"INSERT INTO docs VALUES ({values})", rows)
    connection.commit()
    connection.close()
    return f"sqlite:///{path}?table=docs"


@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 20])
def test_rows_come_in_order(database: Database, block_bytes: int) -> None:
    database.write({"web": numbered(TEXTS), "news": numbered(["n"])}, counted={"web": 50, "news": 1})
    assert read(database.address("web"), block_bytes=block_bytes) == TEXTS
    assert read(database.base, block_bytes=block_bytes) == [*TEXTS, "n"]
    assert read(database.address("news", "web"), block_bytes=block_bytes) == ["n", *TEXTS]
    check_inputs(expand_inputs([database.base]), ["text"])


def test_gaps_do_not_matter_and_uncounted_rows_are_skipped(database: Database) -> None:
    rows = [(number, str(number)) for number in (5, 0, 9, 3, 12)]
    database.write({"web": rows, "all": rows}, counted={"web": 9}, index=None)
    assert read(database.address("web")) == ["0", "3", "5"]
    assert read(database.address("all")) == ["0", "3", "5", "9", "12"]


def test_columns_are_chosen_by_address_and_keys(tmp_path: Path) -> None:
    path = plain(
        tmp_path / "a.db", "CREATE TABLE docs (title, text, form, filt_text)", [("t", "x", "f", "y")], "?,?,?,?"
    )
    assert read(path) == ["y"] and read(f"{path}&column=text") == ["x"] and read(path, keys=("form",)) == ["f"]
    assert read(path, keys=("title", "text")) == [["t"], ["y"]]
    assert read(f"{path}&column=form", keys=("title",)) == ["f"]
    with pytest.raises(DataError, match=r"collection 'docs' has no column 'body'; it has 'title', 'text'"):
        check_inputs([path], ["body"])
    with pytest.raises(ConfigError, match=r"column= selects one column, but --json-keys has 2: text form"):
        check_inputs([f"{path}&column=form"], ["text", "form"])


def test_tables_of_every_kind_have_an_order(tmp_path: Path) -> None:
    rows = [(name,) for name in "cab"]
    assert read(plain(tmp_path / "a.db", "CREATE TABLE docs (text TEXT)", rows)) == ["c", "a", "b"]
    assert read(plain(tmp_path / "b.db", "CREATE TABLE docs (text PRIMARY KEY) WITHOUT ROWID", rows)) == ["a", "b", "c"]
    path = plain(tmp_path / "c.db", "CREATE TABLE docs (text TEXT)", rows)
    with sqlite3.connect(tmp_path / "c.db") as connection:
        connection.execute("CREATE VIEW unsorted AS SELECT text FROM docs")
        connection.execute("CREATE VIEW sorted AS SELECT -rowid AS idx, text FROM docs")
    assert read(path.replace("docs", "sorted")) == ["b", "a", "c"]
    with pytest.raises(DataError, match=r"the view 'unsorted' has no column idx, so its rows have no order"):
        read(path.replace("docs", "unsorted"))


@pytest.mark.parametrize("count", [1, 3, 7, 60])
def test_shares_are_the_whole(database: Database, tmp_path: Path, count: int) -> None:
    database.write({"web": numbered(TEXTS), "news": numbered(["n"] * 5)}, counted={"web": 50, "news": 5})
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    paths = expand_inputs([database.address("web"), str(lines), database.address("news")])
    shares = [share_of(paths, Shard(number, count)) for number in range(1, count + 1)]
    assert [text for share in shares for text in read(*share)] == [*TEXTS, *TEXTS, *["n"] * 5]
    if count == 3:
        assert all(len(read(*share)) > 20 for share in shares)


def test_shards_with_gaps_duplicates_and_leftovers(database: Database) -> None:
    numbers = [0, 1, 3, 3, 3, 3, 3, 6, 7, 8, 9]
    database.write({"web": [(number, str(number)) for number in numbers]}, counted={"web": 7}, index="plain")
    shares = [share_of([database.address("web")], Shard(number, 4)) for number in range(1, 5)]
    assert [text for share in shares for text in read(*share)] == ["0", "1", *["3"] * 5, "6"]


def test_progress_reaches_the_whole(sqlite_database: Database) -> None:
    sqlite_database.write({"web": numbered(TEXTS)})
    path = sqlite_database.address("web")
    size = sqlite_database.path.stat().st_size
    assert total_bytes([path]) == size == sum(block.input_bytes for block in blocks([path], 500))
    parts = [InputPart(path, 0, 20), InputPart(path, 20, None)]
    sizes = [sum(block.input_bytes for block in blocks([part], 500)) for part in parts]
    assert sum(sizes) == size and sizes == [total_bytes([part]) for part in parts] and sizes[0] < sizes[1]


def test_the_pair_is_that_of_lines_for_any_workers(database: Database, tmp_path: Path, choice: TokenizerChoice) -> None:
    database.write({"web": numbered(TEXTS)})
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = EncodeOptions(choice, append_eod=True)
    preprocess([str(lines)], f"{tmp_path}/lines", options, 1, quiet())
    address = expand_inputs([database.base])
    records = []
    for workers, block_bytes in ((1, 1 << 20), (2, 700)):
        prefix = f"{tmp_path}/w{workers}"
        preprocess(address, prefix, options, workers, quiet(), block_bytes)
        for suffix in (".bin", ".idx"):
            whole = Path(f"{tmp_path}/lines_text_document{suffix}").read_bytes()
            assert Path(f"{prefix}_text_document{suffix}").read_bytes() == whole
        sidecar = read_sidecar(f"{prefix}_text_document")
        assert sidecar is not None and len(sidecar.sources) == 1
        source = sidecar.sources[0]
        records.append(source)
        assert source.path.endswith(("?table=web", "?collection=web")) and source.text_bytes > 2000
    assert records[0] == records[1]


def test_bad_rows_are_named_by_their_number(
    sqlite_database: Database, tmp_path: Path, choice: TokenizerChoice, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [*TEXTS[:30], None, 5, b"a\xffb\nc", *TEXTS[33:]]
    sqlite_database.write({"web": numbered(texts)})
    path = sqlite_database.address("web").replace("collection", "table")
    options = EncodeOptions(choice)
    with pytest.raises(DataError, match=r"store\.db\?table=web:31: .*'text' holds a JSON null, not a string.*--on-bad"):
        preprocess([path], f"{tmp_path}/out", options, 1, quiet(), 500)
    share = [InputPart(path, 20, 40)]
    skipping = replace(options, skip_bad_lines=True)
    result = preprocess(share, f"{tmp_path}/out", skipping, 1, quiet(), 500)
    assert (result.skipped, result.documents + result.empty) == (3, 17)
    shown = capsys.readouterr().err
    for words in (":31: ", ":32: byte offset", "holds a JSON number", ":33: ", "not UTF-8: byte 0xff"):
        assert words in shown


def test_an_object_is_not_a_text(tmp_path: Path) -> None:
    with new_database("mongomock", tmp_path) as database:
        database.write({"web": numbered(["a", {"b": 1}, database])[:2]})
        data = next(iter(blocks([database.address("web")], 1000))).read()
        assert parse_lines(data, ["text"], True, True).bad[0].reason == "key 'text' holds a JSON object, not a string"


def test_a_long_row_has_a_block_of_its_own(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.db", "CREATE TABLE docs (text TEXT)", [("a",), ("x" * LONG_LINE_BYTES,), ("b",)])
    sizes = [block.size for block in blocks([path], 1 << 20)]
    assert len(sizes) == 3 and sizes[1] > LONG_LINE_BYTES


def test_an_empty_table_and_vocabularies(sqlite_database: Database) -> None:
    sqlite_database.write({"none": [], "web": numbered(TEXTS)})
    assert read(sqlite_database.address("none")) == []
    assert list(texts_of([sqlite_database.base], ["text"], 1.0, False)) == TEXTS


def test_rows_may_be_taken_by_one_thread_after_another(database: Database) -> None:
    database.write({"web": numbered(TEXTS * 8)})
    found = blocks(expand_inputs([database.base]), 1000)
    data: list[bytes] = []
    for count in (1, 10_000):
        thread = threading.Thread(target=lambda count=count: data.extend(one.read() for one in islice(found, count)))
        thread.start()
        thread.join()
    assert parse_lines(b"".join(data), ["text"], True, False).texts == [TEXTS * 8]


def test_lines_are_the_same_without_the_fast_library(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_database.write({"web": numbered([*TEXTS, "\x00\x1f\x7f\u2028 \\ / \b\f\r\t"])})
    paths = expand_inputs([sqlite_database.base])
    fast = [block.read() for block in blocks(paths, 500)]
    monkeypatch.setattr(store_table, "_DUMPS", store_table._standard_dumps)
    assert [block.read() for block in blocks(paths, 500)] == fast


@pytest.mark.full
def test_errors_come_before_the_work(
    sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"none\.db: no such SQLite file"):
        expand_inputs([f"sqlite:///{tmp_path}/none.db"])
    assert list(tmp_path.iterdir()) == []
    sqlite_database.write({"web": numbered(["a"]), "news": numbered(["b"])})
    with pytest.raises(DataError, match=r"no collection 'wbe'; it has 'web', 'news'"):
        expand_inputs([sqlite_database.address("wbe")])
    with pytest.raises(ConfigError, match=r"holds 2 tables \(web, news\); select one"):
        check_inputs([sqlite_database.base], ["text"])
    with sqlite3.connect(sqlite_database.path, isolation_level=None) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(sqlite_store, "BUSY_SECONDS", 0.05)
        with pytest.raises(StorageError, match=r"store\.db is locked by a process that writes it"):
            check_inputs([sqlite_database.address("web")], ["text"])
        writer.execute("ROLLBACK")


def test_partitions_are_continued_only_if_the_database_is_the_same(
    sqlite_database: Database, tmp_path: Path, choice: TokenizerChoice
) -> None:
    sqlite_database.write({"web": numbered([*TEXTS[:49], None])})
    paths = expand_inputs([sqlite_database.base])
    options = EncodeOptions(choice)
    with pytest.raises(DataError, match=r"table=web:50: "):
        preprocess_in_parts(divide(paths, 3, None, None, options.keys), f"{tmp_path}/out", options, 1, quiet())
    with sqlite3.connect(sqlite_database.path) as connection:
        connection.execute("UPDATE web SET filt_text = 'mended' WHERE idx = 49")
    connection.close()
    with pytest.raises(ConfigError, match=r"holds parts of an unfinished run with other --input"):
        preprocess_in_parts(divide(paths, 3, None, None, options.keys), f"{tmp_path}/out", options, 1, quiet())


def test_passwords_are_not_written(tmp_path: Path, choice: TokenizerChoice) -> None:
    with new_database("mongomock", tmp_path) as database:
        database.write({"web": numbered(TEXTS)})
        path = database.address("web").replace("//", "//me:secret@")
        preprocess([path], f"{tmp_path}/out", EncodeOptions(choice), 1, quiet())
        assert "mongodb://me:***@localhost" in Path(f"{tmp_path}/out_text_document.json").read_text()
        assert total_bytes([path]) is None


def saved(folder: Path) -> str:
    datasets = pytest.importorskip("datasets", reason="the datasets package is not installed")
    datasets.Dataset.from_dict({"text": TEXTS, "number": list(range(50))}).save_to_disk(folder / "saved")
    return f"hf://{folder}/saved"


def test_datasets_of_the_hub(tmp_path: Path, choice: TokenizerChoice) -> None:
    path = saved(tmp_path)
    inputs = expand_inputs([path])
    check_inputs(inputs, ["text"])
    assert inputs == (path,) and total_bytes(inputs) is None
    assert list(texts_of([path], ["text"], 1.0, False)) == TEXTS
    shares = [share_of([path], Shard(number, 3)) for number in (1, 2, 3)]
    assert [len(range(50)[part.start : part.stop]) for share in shares for part in share] == [17, 17, 16]
    options = EncodeOptions(choice)
    for workers in (1, 2):
        preprocess(inputs, f"{tmp_path}/w{workers}", options, workers, quiet(), 800)
    pairs = [Path(f"{tmp_path}/w{workers}_text_document.bin").read_bytes() for workers in (1, 2)]
    assert pairs[0] == pairs[1] != b""
    sidecar = read_sidecar(f"{tmp_path}/w1_text_document")
    assert sidecar is not None and sidecar.sources[0].text_bytes > 2000 and sidecar.sources[0].xxh3_64 is None
    with pytest.raises(DataError, match="number"):
        check_inputs([path], ["body"])
    with pytest.raises(DataError, match=r":31: .*column 'number' holds a value of type int, not text"):
        preprocess([InputPart(path, 30, 40)], f"{tmp_path}/out", replace(options, keys=("number",)), 1, quiet())


def test_invalid_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--input hf:// names no dataset\. Use hf://name"):
        check_inputs(["hf://"], ["text"])
    pytest.importorskip("datasets", reason="the datasets package is not installed")
    with pytest.raises(DataError, match=r"--input .*absent \(--split test\) cannot be read by the datasets library"):
        check_inputs([f"hf://{tmp_path}/absent:test"], ["text"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"some/name .*requires the datasets package: pip install datasets"):
        check_inputs(["hf://some/name:test"], ["text"])


def test_gaps_are_reported_before_preprocessing_and_rejected_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sqlite3.connect(tmp_path / "s.db") as database:
        database.executescript(
            "CREATE TABLE web (idx INTEGER, filt_text TEXT); CREATE UNIQUE INDEX web_idx ON web (idx);"
            "CREATE TABLE meta_info (collection_name TEXT PRIMARY KEY, num_docs INTEGER);"
            "INSERT INTO meta_info VALUES ('web', 5);"
        )
        database.executemany("INSERT INTO web VALUES (?, ?)", [(idx, f"text {idx}") for idx in (0, 1, 4)])
    address = f"sqlite:///{tmp_path}/s.db?table=web"
    check_inputs([address], ("text",))
    assert "2 of the 5 documents that meta_info counts are missing (gaps in idx)" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"2 of the 5 documents of collection 'web' are missing \(gaps in idx\)"):
        open_store(address)


@pytest.mark.parametrize("program", ["tools/preprocess_data.py", "pretrain_gpt.py"])
def test_what_reads_databases_and_the_hub_is_imported_only_when_one_is_named(program: str) -> None:
    names = reached(program)
    assert "megatron.data.formats.store_names" in names
    others = (
        "megatron.data.stores",
        "megatron.data.sources.parquet_rows",
        "trident.corpus.stores",
        "trident.corpus.inputs.hub_rows",
    )
    assert not [name for name in names if name.startswith(others)]
