"""Files of examples: found, read lazily in every form, fingerprinted, and refused with the line."""

import gzip
import json

import pytest

from megatron.data.datasets.examples.example_files import (
    content_hash,
    example_files,
    files_fingerprint,
    names_example_files,
    read_records,
)
from megatron.errors import DataError

RECORDS = [{"prompt": "q", "answer": "ğ"}, {"prompt": "q2", "answer": "a2"}]


def test_suffixes_name_examples(tmp_path):
    assert all(names_example_files(f"a{suffix}") for suffix in (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".ndjson"))
    assert names_example_files("data/*.jsonl")
    assert not names_example_files("data/corpus_text_document")
    assert not names_example_files("sqlite:///chat.db")
    store = tmp_path / "db.json"
    store.write_text(json.dumps({"MONGO_CONNECTION_STRING": "sqlite:///x.db"}))
    assert not names_example_files(str(store))


def test_patterns_are_sorted_and_missing_files_refused(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}\n")
    assert example_files(f"{tmp_path}/*.jsonl") == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    with pytest.raises(DataError, match=r"none.jsonl: no such file. .*pattern"):
        example_files(f"{tmp_path}/none.jsonl")


def test_lines_lists_and_compressed_files_hold_the_same_records(tmp_path):
    lines = "\ufeff" + "\n\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS)
    for name, text in {"a.jsonl": lines, "b.json": json.dumps(RECORDS, indent=1), "c.json": lines}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "e.json.gz").write_bytes(gzip.compress(json.dumps(RECORDS).encode()))
    for name, numbers in {
        "a.jsonl": [1, 3],
        "b.json": [1, 2],
        "c.json": [1, 3],
        "d.jsonl.gz": [1, 3],
        "e.json.gz": [1, 2],
    }.items():
        found = list(read_records(str(tmp_path / name)))
        assert [record for _, record in found] == RECORDS
        assert [number for number, _ in found] == numbers


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"a": 1}\n{"a": \n', r"x.jsonl:2: not JSON: Expecting value.*Write one record as JSON on each line"),
        (b'{"a": "\xff"}\n', r"x.jsonl:1: not JSON: byte 0xff at 7 is not UTF-8"),
        (b"[" * 100_000 + b"\n", r"x.jsonl: not JSON: values are nested too deeply"),
        (b'{"a":' * 100_000 + b"\n", r"x.jsonl:1: not JSON: values are nested too deeply"),
        (b"[1, 2", r"x.jsonl: not JSON: Expecting ',' delimiter"),
    ],
)
def test_bad_content_is_refused_with_its_line(content, what, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=what):
        list(read_records(str(tmp_path / "x.jsonl")))


def test_long_lines_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.data.datasets.examples.example_files._LONGEST_LINE_BYTES", 10)
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": "twelve letters"}\n')
    with pytest.raises(DataError, match=r"x.jsonl:2: the line is longer than 10 bytes"):
        list(read_records(str(tmp_path / "x.jsonl")))
    monkeypatch.setattr("megatron.data.datasets.examples.example_files._LARGEST_LIST_BYTES", 10)
    (tmp_path / "x.json").write_text('["twelve letters"]')
    with pytest.raises(DataError, match=r"x.json holds a list of more than 10 bytes"):
        list(read_records(str(tmp_path / "x.json")))


def test_damaged_compression_is_refused(tmp_path):
    whole = gzip.compress(b'{"a": 1}\n' * 100)
    for content in (whole[:-10], b"no gzip", whole[:20] + b"\0" * 9 + whole[29:]):
        (tmp_path / "x.jsonl.gz").write_bytes(content)
        with pytest.raises(DataError, match="x.jsonl.gz cannot be read"):
            list(read_records(str(tmp_path / "x.jsonl.gz")))


def test_fingerprint_follows_the_content_and_not_the_place(tmp_path):
    for name, text in {"a.jsonl": "1\n", "b.jsonl": "1\n", "c.jsonl": "2\n"}.items():
        (tmp_path / name).write_text(text)
    first = files_fingerprint(f"{tmp_path}/a.jsonl")
    assert first == files_fingerprint(f"{tmp_path}/b.jsonl") != files_fingerprint(f"{tmp_path}/c.jsonl")
    (tmp_path / "a.jsonl").write_text("3\n")
    assert files_fingerprint(f"{tmp_path}/a.jsonl") != first
    with pytest.raises(DataError, match="gone.jsonl cannot be read"):
        content_hash(f"{tmp_path}/gone.jsonl", 1, 1)
