"""Parquet files of windows: written files are read back, other tools' files are read, and everything else is a
one-sentence error.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.formats.parquet_windows import COLUMNS, WindowFacts, WindowFile, Windows
from megatron.data.formats.window_names import expand_windows, is_shard_of, names_windows, shard_name
from megatron.errors import DataError, StorageError
from megatron.tokenizers.record import TokenizerRecord
from trident.corpus.featurize.window_writer import WindowWriter

pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

FACTS = WindowFacts(4, 2, 2, -100, 7, 7, 7, tokenizer=TokenizerRecord("tiny", "abc", 600, 7))


def some_windows(rows: int = 3, length: int = 4) -> Windows:
    ids = np.arange(rows * length).reshape(rows, length)
    mask = np.ones((rows, length), np.float32)
    mask[-1, -1] = 0
    return Windows(ids, mask, np.where(mask == 1, ids, -100))


def write_ours(path: Path, windows: Windows | None = None) -> Path:
    windows = some_windows() if windows is None else windows
    with path.open("wb") as stream, WindowWriter(stream, str(path), FACTS) as writer:
        writer.write(windows, np.arange(len(windows.input_ids)) * 2)
        writer.write(windows, np.arange(len(windows.input_ids)) * 2)
    return path


def write_foreign(path: Path, **changed: Any) -> Path:
    columns: dict[str, Any] = {"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [1, 0]]}
    columns |= {"labels": [[1, 2], [3, -100]], **changed}
    parquet.write_table(pyarrow.table({name: value for name, value in columns.items() if value is not None}), path)
    return path


def test_written_windows_are_read_back_with_their_metadata(tmp_path: Path) -> None:
    path = write_ours(tmp_path / "a.parquet")
    with WindowFile(path) as file:
        assert (file.rows, file.group_rows, file.sequence_length) == (6, (3, 3), 4)
        assert file.facts == FACTS and file.offsets is not None and file.offsets.tolist() == [0, 2, 4, 0, 2, 4]
        for read in (next(file.batches(1000, group=1)), *list(file.batches(3))):
            for name in COLUMNS:
                assert np.array_equal(getattr(read, name), getattr(some_windows(), name))
        assert (read.input_ids.dtype, read.attention_mask.dtype) == (np.int64, np.float32)
    schema = parquet.read_schema(path)
    assert [str(schema.field(name).type.value_type) for name in COLUMNS] == ["int64", "float", "int64"]
    assert schema.names == list(COLUMNS)


def test_windows_of_other_tools_are_read(tmp_path: Path) -> None:
    kinds = (pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.int8(), 2), pyarrow.large_list(pyarrow.int16()))
    values = ([[1, 2], [3, 4]], [[1, 1], [1, 0]], [[1, 2], [3, -100]])
    table = {name: pyarrow.array(one, kind) for name, one, kind in zip(COLUMNS, values, kinds, strict=True)}
    parquet.write_table(pyarrow.table({**table, "extra": ["a", "b"]}), tmp_path / "x.parquet")
    with WindowFile(tmp_path / "x.parquet") as file:
        assert file.facts is None and file.offsets is None and file.sequence_length == 2
        read = next(file.batches(1000, 5, group=0))
    assert [getattr(read, name).tolist() for name in COLUMNS] == [list(one) for one in values]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"labels": None}, r"no column 'labels'; it has 'input_ids', 'attention_mask'"),
        ({"input_ids": [1, 2]}, "column 'input_ids' is int64, not a list of integers"),
        ({"input_ids": [[1.0, 2.0], [3.0, 4.0]]}, "column 'input_ids' is list<.*double>, not a list of integers"),
        ({"attention_mask": [["a", "b"], ["c", "d"]]}, "'attention_mask' is list<.*string>, not a list of numbers"),
        ({"input_ids": [[1, 2], None]}, "row 1 of column 'input_ids' is null"),
        ({"labels": [[1, 2], [3, None]]}, "rows from 0 on hold a null inside of column 'labels'"),
        ({"input_ids": [[1, 2], [3]]}, "row 1 has 1 input_ids and row 0 has 2"),
        ({"labels": [[1], [3]]}, "have 2 input_ids and 1 labels"),
        ({"input_ids": [[1, 2], [3, -4]]}, "row 1 has input_ids outside of 0 to 9: -4 at position 1"),
        ({"input_ids": [[1, 10], [3, 4]]}, "row 0 has input_ids outside of 0 to 9: 10 at position 1"),
        ({"attention_mask": [[1.0, 0.5], [1, 1]]}, "neither 0 nor 1: 0.5 at position 1"),
    ],
)
def test_invalid_windows_are_one_sentence_errors(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    path = write_foreign(tmp_path / "x.parquet", **changed)
    with pytest.raises(DataError, match=rf"x\.parquet.*{text}"):
        next(WindowFile(path).batches(1000, 10, group=0))


def test_ids_that_no_token_file_holds_are_refused_without_a_vocabulary(tmp_path: Path) -> None:
    big = pyarrow.array([[1, 2], [3, 2**63]], pyarrow.list_(pyarrow.uint64()))
    with pytest.raises(DataError, match=f"outside of 0 to 2147483647: {2**63} at position 1"):
        next(WindowFile(write_foreign(tmp_path / "x.parquet", input_ids=big)).batches(1000, group=0))


def test_damaged_files_are_one_sentence_errors(tmp_path: Path) -> None:
    whole = write_ours(tmp_path / "whole.parquet").read_bytes()
    damaged = tmp_path / "damaged.parquet"
    for content in (b"", b"PAR1", whole[:-1], whole[: len(whole) // 2]):
        damaged.write_bytes(content)
        with pytest.raises(DataError, match=r"damaged\.parquet is not a readable Parquet file"):
            WindowFile(damaged)
    place = whole.index(b"\x28\xb5\x2f\xfd")  # the first compressed page
    damaged.write_bytes(whole[:place] + bytes(12) + whole[place + 12 :])
    with pytest.raises(DataError, match=r"damaged\.parquet: rows from 0 on cannot be read"):
        next(WindowFile(damaged).batches(1000, group=0))
    with pytest.raises(DataError, match="rows from 0 on cannot be read"):
        list(WindowFile(damaged).batches(2))
    with pytest.raises(DataError, match=r"none\.parquet is not a readable Parquet file"):
        WindowFile(tmp_path / "none.parquet")


def test_a_footer_that_counts_other_rows_is_refused(tmp_path: Path) -> None:
    whole = write_ours(tmp_path / "whole").read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    reasons = []
    for place in range(footer, len(whole) - 8):
        if whole[place] == 12:  # six rows, as Thrift's compact protocol writes a 6
            (tmp_path / "changed").write_bytes(whole[:place] + bytes([14]) + whole[place + 1 :])
            try:
                WindowFile(tmp_path / "changed")
            except DataError as failure:
                reasons.append(str(failure))
    assert any("its footer counts 7 rows, but its row groups hold 6" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("megatron.windows", "no json", "description in its footer is damaged"),
        ("megatron.windows", FACTS.to_json().replace('"stride": 2', '"stride": "2"'), "stride is '2', not an integer"),
        ("megatron.windows", FACTS.to_json().replace('"pad_id"', '"other"'), "KeyError: 'pad_id'"),
        ("megatron.windows", FACTS.to_json().replace('version": 1', 'version": 2'), "format version 2, expected 1"),
        ("megatron.windows", FACTS.to_json(), "have 2 positions, expected 4 by the footer"),
        ("megatron.windows.offsets", "%", "the offsets of its windows are damaged"),
        ("megatron.windows.offsets", "eJxjYIAAAAAIAAE=", "damaged: 8 bytes, expected 16 for 2 rows"),
    ],
)
def test_damaged_metadata_is_a_one_sentence_error(tmp_path: Path, key: str, value: str, text: str) -> None:
    table = parquet.read_table(write_foreign(tmp_path / "x.parquet"))
    parquet.write_table(table.replace_schema_metadata({key: value}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=text):
        file = WindowFile(tmp_path / "x.parquet")
        _ = file.offsets
        next(file.batches(1000, group=0))


def test_shards_are_found_in_order_by_pattern_prefix_and_name(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"wt.train-0000{number}-of-00003") for number in range(3)]
    for path in [*paths, str(tmp_path / "other.parquet"), str(tmp_path / "wt.train.json")]:
        Path(path).touch()
    assert shard_name(f"{tmp_path}/wt.train", 1, 3) == paths[1] and is_shard_of(f"{tmp_path}/wt.train", paths[1])
    assert expand_windows([f"{tmp_path}/wt.train"]) == tuple(paths)
    assert expand_windows([f"{tmp_path}/wt.train-*"]) == expand_windows([f"{tmp_path}/wt.train-?????-**"])
    assert expand_windows([paths[2], f"{tmp_path}/*.parquet"]) == (paths[2], str(tmp_path / "other.parquet"))
    for value in (f"{tmp_path}/wt.train", f"{tmp_path}/wt.train-*", paths[0], "none.parquet"):
        assert names_windows(value)
    assert not names_windows(f"{tmp_path}/wt") and not names_windows(f"{tmp_path}/wt.train.json")
    Path(f"{tmp_path}/wt.train.idx").touch()
    assert not names_windows(f"{tmp_path}/wt.train")


def test_missing_and_mixed_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"wt matches no Parquet file.*wt-00000-of-NNNNN"):
        expand_windows([f"{tmp_path}/wt"])
    for number in (0, 2):
        (tmp_path / f"wt-0000{number}-of-00003").touch()
    with pytest.raises(DataError, match="wt-00001-of-00003 is missing: 2 of 3 shards exist"):
        expand_windows([f"{tmp_path}/wt*"])
    (tmp_path / "wt-00000-of-00001").touch()
    with pytest.raises(DataError, match="shards of 2 runs: .*wt in 1 and in 3 shards"):
        expand_windows([f"{tmp_path}/wt"])


class FullDisk(io.BytesIO):
    """Takes a number of bytes, then none."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.size:
            raise OSError(28, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("size", [200, 3000])
def test_a_full_disk_is_a_one_sentence_error(size: int) -> None:
    with (
        pytest.raises(StorageError, match=r"Cannot write out/x: .*No space left on device"),
        WindowWriter(FullDisk(size), "out/x", FACTS) as writer,
    ):
        writer.write(some_windows(100), np.arange(100))
