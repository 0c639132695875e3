"""Parquet files with a wrong footer or invalid texts: rows are never dropped silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from trident.corpus.cleaning.documents.entries import read_entries
from trident.corpus.inputs import parquet as parquet_module
from trident.corpus.inputs.block import parse_block
from trident.corpus.inputs.input_blocks import blocks

pyarrow = pytest.importorskip("pyarrow", reason="the pyarrow package is not installed")
parquet = pytest.importorskip("pyarrow.parquet", reason="the pyarrow package is not installed")


def write(path: Path, texts: list[Any], **more: Any) -> str:
    parquet.write_table(pyarrow.table({"text": texts, **more}), path, row_group_size=4)
    return str(path)


def test_texts_that_are_not_utf8_are_bad_rows(tmp_path: Path) -> None:
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, pyarrow.array([b"good", b"\xff\xfe", b"too"], pyarrow.binary()).buffers()
    )
    inner = pyarrow.StructArray.from_arrays([bad], ["b"])
    path = write(tmp_path / "in.parquet", bad, a=inner, c=pyarrow.array([b"1", b"\xc3\xa9", b"\xff"]))
    (block,) = blocks([path], 1 << 20, keys=["text", "a.b"])
    parsed = parse_block(block, ["text"], True)
    assert parsed.texts == [["good", "too"]]
    assert [(bad.line, bad.reason) for bad in parsed.bad] == [
        (1, "column 'text' holds bytes that are not text in this row")
    ]
    assert parse_block(block, ["a.b"], True).bad_count == 1
    (block,) = blocks([path], 1 << 20, keys=["c"])
    parsed = parse_block(block, ["c"], True)  # writers do not always mark texts as such
    assert parsed.texts == [["1", "é"]] and "'c' holds bytes that are not text" in parsed.bad[0].reason
    cleaned = read_entries(block, ["c"])
    assert [entry.text for entry in cleaned] == ["1", "é", None] and cleaned[2].bad is not None


def test_a_file_of_another_format_is_recognized(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    for content, words in ((b"PK\x03\x04", r"\. The file looks like a zip archive\."), (b"PAR1 cut", r"[^.]\.$")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"in.parquet is not a readable Parquet file: .*{words}"):
            list(blocks([str(path)], 1))


class _Lying:
    """Something of pyarrow's with some other answers."""

    def __init__(self, true: Any, **answers: Any) -> None:
        self._true = true
        self.__dict__.update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._true, name)


def test_a_footer_whose_counts_disagree_is_damaged(tmp_path: Path) -> None:
    metadata = parquet.ParquetFile(write(tmp_path / "in.parquet", ["a"] * 10)).metadata
    parquet_module._check_counts(metadata, "in.parquet")
    with pytest.raises(DataError, match=r"in\.parquet: its footer counts 11 rows, but the row groups hold 10"):
        parquet_module._check_counts(_Lying(metadata, num_rows=11), "in.parquet")
    groups = [_Lying(metadata.row_group(number)) for number in range(3)]
    groups[1].num_rows, groups[2].num_rows = 3, 3
    with pytest.raises(DataError, match=r"row group 1 has 3 rows, but 4 values in column 'text'"):
        parquet_module._check_counts(_Lying(metadata, row_group=groups.__getitem__), "in.parquet")


def test_a_column_that_would_grow_beyond_all_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.parquet"
    parquet.write_table(pyarrow.table({"text": ["a" * 2_000_000] * 2, "number": [1, 2]}), path, compression="zstd")
    assert len(list(parquet_module.parquet_rows(str(path), ["text"], 1 << 20))) > 0
    monkeypatch.setattr(parquet_module, "_LONGEST_FREE_BYTES", 1 << 20)
    assert len(list(parquet_module.parquet_rows(str(path), ["number"], 1 << 20))) == 1
    with pytest.raises(
        DataError, match=r"row group 0 has [24],000,\d+ bytes of column 'text' .*: a decompression bomb"
    ):
        list(parquet_module.parquet_rows(str(path), ["text"], 1 << 20))


def test_missing_rows_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "in.parquet", ["a"] * 10)
    opened = parquet_module._open

    class Forgetful:
        def __init__(self, path: str) -> None:
            self.file = opened(path)
            self.metadata, self.schema_arrow = self.file.metadata, self.file.schema_arrow

        def __enter__(self) -> Forgetful:
            return self

        def __exit__(self, *more: object) -> None:
            self.file.close()

        def iter_batches(self, **more: Any) -> Any:
            return list(self.file.iter_batches(**{**more, "batch_size": 4}))[:-1]

    monkeypatch.setattr(parquet_module, "_open", Forgetful)
    with pytest.raises(DataError, match=r"counts 10 rows, but only 8 could be read"):
        list(parquet_module.parquet_rows(path, ["text"], 1 << 20))
