"""Small Parquet files of windows for the tests of several packages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.formats.parquet_windows import WindowFacts, Windows
from trident.corpus.featurize.window_writer import WindowWriter

IGNORED = -100


def padded_windows(rows: Sequence[Sequence[int]], length: int, pad_id: int = 0) -> Windows:
    """Windows of the given ids, filled at the end without loss."""
    ids = np.full((len(rows), length), pad_id, np.int64)
    mask = np.zeros((len(rows), length), np.float32)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
        mask[place, : len(row)] = 1
    return Windows(ids, mask, np.where(mask == 1, ids, IGNORED))


def write_windows(path: Path, windows: Windows, group_rows: int = 4, **facts: Any) -> str:
    """Writes them as tools/corpus/featurize.py would."""
    length = windows.input_ids.shape[1]
    values: dict[str, Any] = {"special_tokens": 0, "stride": length, "ignore_label": IGNORED, "bos_id": None}
    values |= {"eos_id": None, "pad_id": 0, **facts}
    with path.open("wb") as stream, WindowWriter(stream, str(path), WindowFacts(length, **values)) as writer:
        for first in range(0, len(windows.input_ids), group_rows):
            part = slice(first, first + group_rows)
            rows = Windows(windows.input_ids[part], windows.attention_mask[part], windows.labels[part])
            writer.write(rows, np.zeros(len(rows.input_ids), np.int64))
    return str(path)


def write_foreign_windows(path: Path, group_rows: int = 4, **columns: Any) -> str:
    """Writes lists of lists with pyarrow alone, as any other tool would."""
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, row_group_size=group_rows)
    return str(path)


def counting_windows(rows: int, length: int, first: int = 0) -> Windows:
    """Windows whose ids count up from `first`, so that every id occurs once."""
    ids = np.arange(first, first + rows * length).reshape(rows, length)
    return Windows(ids, np.ones((rows, length), np.float32), ids.copy())
