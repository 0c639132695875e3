"""Writes windows of tokens into Parquet files, which `megatron/data/formats/parquet_windows.py` reads."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import numpy.typing as npt

from megatron.data.formats.parquet_windows import COLUMNS, FACTS_KEY, OFFSETS_KEY, WindowFacts, Windows, load_arrow
from megatron.files.failures import storage_error


class WindowWriter:
    """Writes windows into an open Parquet file, which the caller renames; use as a context manager.

    Args:
        stream: open for writing bytes.
        path: the file's name, for errors.
    """

    def __init__(self, stream: IO[bytes], path: str, facts: WindowFacts) -> None:
        self._arrow = arrow = load_arrow(path)
        self._parquet = arrow.parquet
        self._path = path
        self._facts = facts
        self._offsets: list[npt.NDArray[np.int64]] = []
        kinds = (arrow.int64(), arrow.float32(), arrow.int64())
        self._schema = arrow.schema([(name, arrow.list_(kind)) for name, kind in zip(COLUMNS, kinds, strict=True)])
        self._writer = self._parquet.ParquetWriter(
            stream,
            self._schema,
            compression="zstd",
            compression_level=1,
            write_statistics=False,  # extremes of ids are useless
            write_page_checksum=True,
        )

    def __enter__(self) -> WindowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._quietly_close()
            return
        data = np.concatenate([*self._offsets, np.empty(0, np.int64)]).astype("<i8").tobytes()
        notes = {
            FACTS_KEY: self._facts.to_json().encode(),
            OFFSETS_KEY: base64.b64encode(zlib.compress(data, 6)),
        }
        try:
            self._writer.add_key_value_metadata(notes)
            self._writer.close()
        except OSError as problem:
            raise storage_error(Path(self._path), problem) from problem

    def write(self, windows: Windows, offsets: npt.NDArray[np.int64]) -> None:
        """Appends a row group.

        Shapes:
            offsets: int64 [n], offset of each window in its document.

        Raises:
            StorageError: writing failed.
        """
        arrow = self._arrow
        rows, length = windows.input_ids.shape
        bounds = arrow.array(np.arange(rows + 1, dtype=np.int32) * np.int32(length))
        columns = [
            arrow.ListArray.from_arrays(bounds, arrow.array(np.ascontiguousarray(values).reshape(-1)))
            for values in (windows.input_ids, windows.attention_mask, windows.labels)
        ]
        try:
            self._writer.write_table(arrow.Table.from_arrays(columns, schema=self._schema), row_group_size=max(1, rows))
        except OSError as failure:
            raise storage_error(Path(self._path), failure) from failure
        self._offsets.append(offsets)

    def _quietly_close(self) -> None:
        try:
            self._writer.close()
        except (OSError, ValueError):  # the original failure is reported instead
            return
