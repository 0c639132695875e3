"""Parquet windows as rows of training: which labels count, in which files, and everything that is wrong with them."""

import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.parquet_windows import Windows
from megatron.data.formats.window_names import shard_name
from megatron.data.sources import parquet_rows
from megatron.data.sources.parquet_rows import ParquetRows
from megatron.errors import ConfigError, DataError
from tests.data.windows_files import counting_windows, padded_windows, write_foreign_windows, write_windows

pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")


def all_rows(source: ParquetRows) -> tuple[list[list[int]], list[list[int]]]:
    tokens, mask = source.read(np.arange(len(source)))
    return tokens.tolist(), mask.astype(int).tolist()


def test_a_label_counts_if_it_is_real_and_the_next_token_of_the_window(tmp_path: Path) -> None:
    source = ParquetRows(write_windows(tmp_path / "a.parquet", padded_windows([[5, 0, 7, 8], [9, 3], [4]], 4)))
    tokens, mask = all_rows(source)
    assert [row[:4] for row in tokens] == [[5, 0, 7, 8], [9, 3, 0, 0], [4, 0, 0, 0]]
    assert mask == [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert (len(source), source.row_length) == (3, 4)


def test_ignored_labels_inside_a_window_and_a_label_of_the_files_own(tmp_path: Path) -> None:
    windows = padded_windows([[5, 6, 7, 8]], 4)
    windows.labels[0, :3] = -1
    path = write_windows(tmp_path / "a.parquet", windows, ignore_label=-1)
    assert all_rows(ParquetRows(path))[1] == [[0, 0, 1, 0]]


def test_labels_aligned_with_their_inputs(tmp_path: Path) -> None:
    """As jax-lm-training writes them: 1 is its beginning, 2 its end, 0 fills and has no loss."""
    path = write_foreign_windows(
        tmp_path / "dataset-00000-of-00001",
        input_ids=[[1, 5, 6, 7], [1, 5, 2, 0]],
        attention_mask=[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]],
        labels=[[5, 6, 7, 8], [5, 2, -100, -100]],
    )
    tokens, mask = all_rows(ParquetRows(path))
    assert tokens == [[1, 5, 6, 7, 8], [1, 5, 2, 0, 0]]
    assert mask == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_rows_are_read_in_any_order_from_any_files_and_groups(tmp_path: Path) -> None:
    for number, rows in enumerate((7, 0, 10)):
        first = 0 if number == 0 else 7 * 4
        write_windows(tmp_path / shard_name("wt", number, 3), counting_windows(rows, 4, first), group_rows=3)
    source = ParquetRows(str(tmp_path / "wt"))
    assert len(source) == 17
    rows = np.random.default_rng(1).permutation(17)[:11]
    tokens, mask = source.read(rows)
    assert tokens[:, :4].tolist() == [list(range(4 * row, 4 * row + 4)) for row in rows.tolist()]
    assert mask[:, :3].all() and not mask[:, 3].any()
    assert source.locate(9, 1) == f"{tmp_path / shard_name('wt', 2, 3)}: position 1 of row 2"
    assert ParquetRows(str(tmp_path / "wt-*")).fingerprint == source.fingerprint


def test_large_row_groups_are_read_in_batches_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_rows, "_BATCH_ROWS", 3)
    monkeypatch.setattr(parquet_rows, "_BLOCK_TOKENS", 20)
    monkeypatch.setattr(parquet_rows, "_LARGE_GROUP_TOKENS", 40)
    source = ParquetRows(write_windows(tmp_path / "a.parquet", counting_windows(20, 4), group_rows=12))
    assert all_rows(source)[0][17][:4] == [68, 69, 70, 71]
    said = capsys.readouterr().err
    assert "a.parquet has 12 rows in one row group" in said and "row_group_size=5" in said
    assert source.blocks(0, 20).tolist() == [0, 4, 8, 12, 16, 20]
    assert source.blocks(3, 17).tolist() == [3, 4, 8, 12, 16, 17]


def test_the_fingerprint_depends_on_content_not_on_location(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_windows(tmp_path / folder / "a.parquet", counting_windows(6, 4))
    one, two = (ParquetRows(str(tmp_path / folder / "a.parquet")) for folder in ("one", "two"))
    assert one.fingerprint == two.fingerprint
    write_windows(tmp_path / "two" / "a.parquet", counting_windows(6, 4, first=1))
    assert ParquetRows(str(tmp_path / "two" / "a.parquet")).fingerprint != one.fingerprint


def broken(kind: str) -> Windows:
    windows = padded_windows([[5, 6, 7], [5, 6, 7, 8]], 4)
    if kind == "labels":
        windows.labels[1, 2] = 3
    elif kind == "begins late":
        windows.attention_mask[1, 0] = 0
    return windows


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("labels", "row 1 has a label that is neither its input_id nor the next one, at position 2"),
        ("begins late", "row 1 has padding before its tokens, which the model would read as text, at position 0"),
    ],
)
def test_invalid_rows_are_located(tmp_path: Path, kind: str, match: str) -> None:
    source = ParquetRows(write_windows(tmp_path / "a.parquet", broken(kind)))
    with pytest.raises(DataError, match=match):
        all_rows(source)


def test_files_that_are_unusable_for_training(tmp_path: Path) -> None:
    write_windows(tmp_path / shard_name("short", 0, 2), counting_windows(2, 4))
    with pytest.raises(DataError, match="short-00001-of-00002 is missing: 1 of 2 shards exist"):
        ParquetRows(str(tmp_path / "short"))
    with pytest.raises(DataError, match=r"nothing\*.parquet matches no Parquet file"):
        ParquetRows(str(tmp_path / "nothing*.parquet"))
    write_windows(tmp_path / "empty.parquet", counting_windows(0, 4))
    with pytest.raises(DataError, match="empty.parquet: its Parquet files hold no windows"):
        ParquetRows(str(tmp_path / "empty.parquet"))
    write_windows(tmp_path / "l4.parquet", counting_windows(2, 4))
    write_windows(tmp_path / "l6.parquet", counting_windows(2, 6))
    with pytest.raises(DataError, match="l6.parquet has windows of 6 tokens, the previous files of .* of 4"):
        ParquetRows(str(tmp_path / "l?.parquet"))
    (tmp_path / "text.parquet").write_text("no Parquet file")
    with pytest.raises(DataError, match="text.parquet is not a readable Parquet file"):
        ParquetRows(str(tmp_path / "text.parquet"))


def test_rows_of_several_lengths_are_refused_when_they_are_opened(tmp_path: Path) -> None:
    ragged = [[1, 2], [3, 4], [5, 6, 7]]
    path = write_foreign_windows(
        tmp_path / "a.parquet", group_rows=2, input_ids=ragged, attention_mask=ragged, labels=ragged
    )
    with pytest.raises(DataError, match="row group 1 has 3 input_ids in 1 rows, expected 2 per row"):
        ParquetRows(path)


def test_a_file_that_was_replaced_or_damaged_while_it_was_in_use(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    source = ParquetRows(write_windows(path, counting_windows(20, 4)))
    write_windows(path, counting_windows(20, 4), group_rows=5)
    with pytest.raises(DataError, match="a.parquet: row groups changed since the run began"):
        all_rows(source)
    source = ParquetRows(write_windows(path, counting_windows(20, 4)))
    content = bytearray(path.read_bytes())
    content[20:60] = bytes(40)
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="a.parquet: rows from 0 on cannot be read"):
        all_rows(source)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_windows(tmp_path / "a.parquet", counting_windows(2, 4))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="a.parquet requires the pyarrow package: pip install pyarrow"):
        ParquetRows(path)
