"""Windows of tokens in Parquet files: rows of equal length with the columns `input_ids`, `attention_mask`, `labels`.

Any tool may write them; `labels` repeat `input_ids` at positions with a loss and hold the ignore label elsewhere (the
shift by one happens in the model). Files of `tools/corpus/featurize.py` also store the cutting rules and each window's
offset in its document in their footer, so that the documents can be reassembled.

Source: the columns and the shard names `<path>-00000-of-00003` are from jax-lm-training's `preprocess.py` (Apache
Beam's `WriteToParquet`).
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError, DataError
from megatron.files.plain import check_plain
from megatron.tokenizers.record import TokenizerRecord

COLUMNS = ("input_ids", "attention_mask", "labels")
LARGEST_ID = 2**31 - 1
FORMAT_VERSION = 1
FACTS_KEY = b"megatron.windows"
OFFSETS_KEY = b"megatron.windows.offsets"


@dataclass(frozen=True)
class Windows:
    """Rows of equal length.

    Shapes:
        input_ids: int64 [n, s]; attention_mask: float32 [n, s], 1 for tokens and 0 for padding; labels: int64 [n, s].
    """

    input_ids: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


@dataclass(frozen=True)
class WindowFacts:
    """The parameters of a file's windows; the same in all shards.

    Args:
        sequence_length: positions of every window.
        special_tokens: ids around the tokens of a window: 2 is `bos_id` and `eos_id`, 1 is `eos_id`, 0 none.
        stride: tokens between the starts of consecutive windows of a document.
        pad_id: fills short windows; padding is marked by `attention_mask` and `labels`, not by this id.
        mask_overlap: tokens that are also in the previous window have the ignore label.
        document_begin, document_end: ids removed from the ends of every document in favour of `bos_id` and `eos_id`;
            None if none were.
        tokenizer: of the ids; None if unknown.
    """

    sequence_length: int
    special_tokens: int
    stride: int
    ignore_label: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    mask_overlap: bool = False
    document_begin: int | None = None
    document_end: int | None = None
    tokenizer: TokenizerRecord | None = None

    @property
    def tokens_per_window(self) -> int:
        """Maximum number of document tokens in a window."""
        return self.sequence_length - self.special_tokens

    @property
    def before(self) -> int:
        """Ids before the tokens of a document in a window."""
        return 1 if self.special_tokens == 2 else 0

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, sort_keys=True)

    @staticmethod
    def of_json(text: bytes, path: str) -> WindowFacts:
        """Reads the output of `to_json`.

        Raises:
            DataError: the text is damaged or of a later version.
        """
        try:
            content = json.loads(text)
            version = content.pop("format_version")
            if version == FORMAT_VERSION:
                tokenizer = content.pop("tokenizer")
                for name in ("sequence_length", "special_tokens", "stride", "ignore_label", "pad_id"):
                    if type(content[name]) is not int:
                        raise TypeError(f"{name} is {content[name]!r}, not an integer")
                record = None if tokenizer is None else TokenizerRecord.from_json(tokenizer)
                return WindowFacts(**content, tokenizer=record)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as failure:
            raise DataError(
                f"{path}: the description in its footer is damaged ({type(failure).__name__}: {failure}). Recreate the "
                "file with tools/corpus/featurize.py."
            ) from failure
        raise DataError(
            f"{path}: its windows have format version {version!r}, expected {FORMAT_VERSION}. Use the release that "
            "wrote them."
        )


class WindowFile:
    """Reads the windows of one Parquet file by row groups; the schema is checked on opening.

    Args:
        path: the file.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: the file does not exist, is damaged, or does not hold windows.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._arrow = load_arrow(self.path)
        parquet = self._arrow.parquet
        try:
            check_plain(self.path)
            self._file = parquet.ParquetFile(self.path, page_checksum_verification=True)
            self._check_schema(self._file.schema_arrow)
            footer = self._file.metadata
            self.rows: int = footer.num_rows
            self.group_rows = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
        except (OSError, ValueError, self._arrow.ArrowException) as failure:
            raise DataError(f"{self.path} is not a readable Parquet file: {failure}.") from failure
        if sum(self.group_rows) != self.rows or min(self.group_rows, default=0) < 0:
            raise DataError(
                f"{self.path}: its footer counts {self.rows} rows, but its row groups hold {sum(self.group_rows)}. The "
                "file is damaged; download or create it again."
            )
        self._notes: Mapping[bytes, bytes] = footer.metadata or {}
        text = self._notes.get(FACTS_KEY)
        self.facts = None if text is None else WindowFacts.of_json(text, self.path)

    def __reduce__(self) -> tuple[type[WindowFile], tuple[str]]:
        return WindowFile, (self.path,)

    def __enter__(self) -> WindowFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @cached_property
    def sequence_length(self) -> int:
        """Positions of every window, by the footer; 0 without windows.

        Raises:
            DataError: the counted values do not make up rows of equal length.
        """
        if self.facts is not None:
            return self.facts.sequence_length
        footer = self._file.metadata
        leaves = [footer.schema.column(index).path.split(".")[0] for index in range(footer.num_columns)]
        column = leaves.index(COLUMNS[0])
        length = 0
        for group, rows in enumerate(self.group_rows):
            values = footer.row_group(group).column(column).num_values if rows else 0
            length = length or values // max(rows, 1)
            if values != rows * length:
                raise DataError(
                    f"{self.path}: row group {group} has {values} input_ids in {rows} rows, expected {length} per row. "
                    "Windows must have equal lengths: pad them when creating the file."
                )
        return int(length)

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64] | None:
        """Offset of each window in its document, in tokens; None if another tool wrote the file.

        Shapes:
            int64 [rows]; 0 starts a document.

        Raises:
            DataError: the offsets are damaged.
        """
        text = self._notes.get(OFFSETS_KEY)
        if text is None:
            return None
        size = 8 * self.rows
        try:
            data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
        except (binascii.Error, zlib.error) as failure:
            raise DataError(f"{self.path}: the offsets of its windows are damaged ({failure}).") from failure
        if len(data) != size:
            raise DataError(
                f"{self.path}: the offsets of its windows are damaged: {len(data)} bytes, expected {size} for "
                f"{self.rows} rows. Recreate the file with tools/corpus/featurize.py."
            )
        return np.frombuffer(data, "<i8")

    def batches(self, rows: int, vocab_size: int | None = None, group: int | None = None) -> Iterator[Windows]:
        """Yields the windows of the file or of one row group, at most `rows` at a time.

        Args:
            vocab_size: ids must be below it.

        Raises:
            DataError: rows are damaged, hold nulls, differ in length, or have ids outside the vocabulary.
        """
        first = sum(self.group_rows[:group]) if group is not None else 0
        groups = None if group is None else [group]
        source = self._file.iter_batches(
            batch_size=rows, row_groups=groups, columns=list(COLUMNS), use_threads=group is not None
        )
        while True:
            try:
                batch = next(source, None)
            except (OSError, self._arrow.ArrowException) as failure:
                raise DataError(
                    f"{self.path}: rows from {first} on cannot be read: {failure}. The file is damaged; download or "
                    "create it again."
                ) from failure
            if batch is None:
                return
            yield self._windows(batch, first, vocab_size)
            first += batch.num_rows

    def _windows(self, batch: Any, first: int, vocab_size: int | None) -> Windows:
        ids, mask, labels = (self._matrix(batch.column(name), name, first) for name in COLUMNS)
        for name, values in (("attention_mask", mask), ("labels", labels)):
            if values.shape != ids.shape:
                raise DataError(
                    f"{self.path}: rows from {first} on have {ids.shape[1]} input_ids and {values.shape[1]} {name}; "
                    "each position needs one of each."
                )
        self._check_length(ids.shape[1], first)
        last = LARGEST_ID if vocab_size is None else vocab_size - 1
        self._check_values(first, ids, (ids < 0) | (ids > last), f"input_ids outside of 0 to {last}")
        self._check_values(first, mask, (mask != 0) & (mask != 1), "an attention_mask that is neither 0 nor 1")
        return Windows(
            ids.astype(np.int64, copy=False),
            mask.astype(np.float32, copy=False),
            labels.astype(np.int64, copy=False),
        )

    def _check_schema(self, schema: Any) -> None:
        types = self._arrow.types
        for name in COLUMNS:
            if name not in schema.names:
                columns = ", ".join(map(repr, schema.names[:8])) or "none"
                raise DataError(f"{self.path} holds no windows: no column {name!r}; it has {columns}.")
            kind = schema.field(name).type
            is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            numbers = is_list and (
                types.is_integer(kind.value_type) or (name == "attention_mask" and types.is_floating(kind.value_type))
            )
            if not numbers:
                expected = "numbers" if name == "attention_mask" else "integers"
                raise DataError(f"{self.path} holds no windows: column {name!r} is {kind}, not a list of {expected}.")

    def _matrix(self, column: Any, name: str, first: int) -> npt.NDArray[Any]:
        """Returns the values of a list column as a matrix."""
        rows, values = len(column), column.flatten()
        if column.null_count:
            row = first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise DataError(f"{self.path}: row {row} of column {name!r} is null; every row must hold a list.")
        if values.null_count:
            raise DataError(f"{self.path}: rows from {first} on hold a null inside of column {name!r}.")
        lengths = self._arrow.compute.list_value_length(column).to_numpy()
        if rows and (lengths != lengths[0]).any():
            other = int(np.flatnonzero(lengths != lengths[0])[0])
            raise DataError(
                f"{self.path}: row {first + other} has {lengths[other]} {name} and row {first} has {lengths[0]}. "
                "Windows must have equal lengths: pad them when creating the file."
            )
        return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(rows, int(lengths[0]) if rows else 0)

    def _check_length(self, length: int, first: int) -> None:
        expected = length if self.facts is None else self.facts.sequence_length
        if length != expected:
            raise DataError(
                f"{self.path}: rows from {first} on have {length} positions, expected {expected} by the footer. The "
                "file is damaged; create it again."
            )

    def _check_values(self, first: int, values: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], what: str) -> None:
        if wrong.any():
            row, position = (int(indices[0]) for indices in np.nonzero(wrong))
            raise DataError(
                f"{self.path}: row {first + row} has {what}: {values[row, position]} at position {position}. The file "
                "is damaged, or was created with another tokenizer."
            )


def load_arrow(path: str) -> Any:
    """Imports the optional package pyarrow, with its Parquet and compute modules.

    Raises:
        ConfigError: pyarrow is missing.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as failure:
        raise ConfigError(f"{path} requires the pyarrow package: pip install pyarrow.") from failure
    return pyarrow
