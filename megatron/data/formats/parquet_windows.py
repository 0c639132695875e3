"""Windows of tokens in Parquet files: rows of one length with the columns `input_ids`, `attention_mask`, `labels`.

Any tool may have written them; `labels` repeat `input_ids` where there is something to learn and hold the ignore label
elsewhere (the shift by one happens in the model). Files of `tools/corpus/featurize.py` also say, in their footer, how
the windows were cut and where in its document each of them begins, so that the documents can be reassembled.

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
    """Rows of one length.

    Shapes:
        input_ids: int64 [n, s]; attention_mask: float32 [n, s], 1 for tokens and 0 for padding; labels: int64 [n, s].
    """

    input_ids: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


@dataclass(frozen=True)
class WindowFacts:
    """How the windows of a file were made; the same in all shards.

    Args:
        sequence_length: positions of every window.
        special_tokens: ids put around the tokens of a window: 2 is `bos_id` and `eos_id`, 1 is `eos_id`, 0 none.
        stride: tokens from the start of a window to the start of the next one of the document.
        pad_id: fills short windows; `attention_mask` and `labels` mark padding, never this id.
        mask_overlap: tokens that the window before holds too have the ignore label.
        document_begin, document_end: ids that began and ended every document and were taken off, as `bos_id` and
            `eos_id` say the same; None where none was.
        tokenizer: that made the ids, None when unknown.
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
        """Most tokens of a document in one window."""
        return self.sequence_length - self.special_tokens

    @property
    def before(self) -> int:
        """Ids before the tokens of a document in a window."""
        return 1 if self.special_tokens == 2 else 0

    def to_json(self) -> str:
        """What the footer holds."""
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, sort_keys=True)

    @staticmethod
    def of_json(text: bytes, path: str) -> WindowFacts:
        """Reads what `to_json` gave.

        Raises:
            DataError: it is damaged or of a later version.
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
                f"{path}: the description in its footer is damaged ({type(failure).__name__}: {failure}). Make the "
                "file again with tools/corpus/featurize.py."
            ) from failure
        raise DataError(
            f"{path}: its windows are described in version {version!r}; version {FORMAT_VERSION} is read. Use the "
            "release that wrote them."
        )


class WindowFile:
    """Reads the windows of one Parquet file by row groups; its form is checked when it is opened.

    Args:
        path: the file.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: there is no such file, it is damaged, or it holds something else than windows.
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
            raise DataError(f"{self.path} is not a Parquet file that can be read: {failure}.") from failure
        if sum(self.group_rows) != self.rows or min(self.group_rows, default=0) < 0:
            raise DataError(
                f"{self.path}: its footer counts {self.rows} rows, but its row groups hold {sum(self.group_rows)}. The "
                "file is damaged; fetch or make it again."
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
        """Positions of every window, by the footer; 0 when there is none.

        Raises:
            DataError: the values it counts do not make up rows of one length.
        """
        if self.facts is not None:
            return self.facts.sequence_length
        footer = self._file.metadata
        leaves = [footer.schema.column(place).path.split(".")[0] for place in range(footer.num_columns)]
        place = leaves.index(COLUMNS[0])
        length = 0
        for group, rows in enumerate(self.group_rows):
            values = footer.row_group(group).column(place).num_values if rows else 0
            length = length or values // max(rows, 1)
            if values != rows * length:
                raise DataError(
                    f"{self.path}: row group {group} counts {values} input_ids in {rows} rows, which others say have "
                    f"{length} each. Windows have one length: pad them when they are made."
                )
        return int(length)

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64] | None:
        """Where in its document each window begins, in tokens; None where another tool wrote the file.

        Shapes:
            int64 [rows]; 0 begins a document.

        Raises:
            DataError: they are damaged.
        """
        text = self._notes.get(OFFSETS_KEY)
        if text is None:
            return None
        size = 8 * self.rows
        try:
            data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
        except (binascii.Error, zlib.error) as failure:
            raise DataError(f"{self.path}: the places of its windows are damaged ({failure}).") from failure
        if len(data) != size:
            raise DataError(
                f"{self.path}: the places of its windows are damaged: {len(data)} bytes, {size} expected for "
                f"{self.rows} rows. Make the file again with tools/corpus/featurize.py."
            )
        return np.frombuffer(data, "<i8")

    def batches(self, rows: int, vocab_size: int | None = None, group: int | None = None) -> Iterator[Windows]:
        """All windows, or one row group's, at most `rows` rows at once, however large it is.

        Args:
            vocab_size: ids must be below it; they are never negative.

        Raises:
            DataError: rows are damaged, or hold nulls, rows of several lengths, or ids outside the vocabulary.
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
                    f"{self.path}: rows from {first} on cannot be read: {failure}. The file is damaged; fetch or make "
                    "it again."
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
                raise DataError(f"{self.path} holds no windows: there is no column {name!r}; it has {columns}.")
            kind = schema.field(name).type
            is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            numbers = is_list and (
                types.is_integer(kind.value_type) or (name == "attention_mask" and types.is_floating(kind.value_type))
            )
            if not numbers:
                wanted = "numbers" if name == "attention_mask" else "integers"
                raise DataError(f"{self.path} holds no windows: column {name!r} is {kind}, not a list of {wanted}.")

    def _matrix(self, column: Any, name: str, first: int) -> npt.NDArray[Any]:
        """The values of a list column as rows of one length."""
        rows, values = len(column), column.flatten()
        if column.null_count:
            place = first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise DataError(f"{self.path}: row {place} of column {name!r} is null; every row must hold a list.")
        if values.null_count:
            raise DataError(f"{self.path}: rows from {first} on hold a null inside of column {name!r}.")
        lengths = self._arrow.compute.list_value_length(column).to_numpy()
        if rows and (lengths != lengths[0]).any():
            other = int(np.flatnonzero(lengths != lengths[0])[0])
            raise DataError(
                f"{self.path}: row {first + other} has {lengths[other]} {name} and row {first} has {lengths[0]}. "
                "Windows have one length: pad them when they are made."
            )
        return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(rows, int(lengths[0]) if rows else 0)

    def _check_length(self, length: int, first: int) -> None:
        expected = length if self.facts is None else self.facts.sequence_length
        if length != expected:
            raise DataError(
                f"{self.path}: rows from {first} on have {length} positions; its footer says {expected}. The file is "
                "damaged; make it again."
            )

    def _check_values(self, first: int, values: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], what: str) -> None:
        if wrong.any():
            row, position = (int(place[0]) for place in np.nonzero(wrong))
            raise DataError(
                f"{self.path}: row {first + row} has {what}: {values[row, position]} at position {position}. The file "
                "is damaged, or was made with another tokenizer."
            )


def load_arrow(path: str) -> Any:
    """The optional package pyarrow, with its parts for Parquet and computing.

    Raises:
        ConfigError: it is missing.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as failure:
        raise ConfigError(f"{path} needs the pyarrow package for Parquet: pip install pyarrow.") from failure
    return pyarrow
