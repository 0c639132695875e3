"""Windows of tokens in Parquet files as training rows.

A label has a loss where it is not the ignored one and the attention mask is 1. `labels` repeat `input_ids`; in files
without a description, as in jax-lm-training's, labels may be shifted by one already; the rows show which of the two
applies.

A row group is the smallest part of a Parquet file that can be decoded. So rows are read one chunk of the order at a
time, every group once, and only that chunk is held in memory. Groups of half a million tokens, as written by
tools/corpus/featurize.py, are decoded once per epoch; larger ones once for every half million tokens.

Source: codertimo/jax-lm-training `jax_lm/preprocess.py` (`PaddingAndPackagingDoFN`).
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron import log
from megatron.data.formats.parquet_windows import LARGEST_ID, WindowFacts, WindowFile, Windows
from megatron.data.formats.window_names import expand_windows
from megatron.data.order.row_order import RowSource
from megatron.data.sources.source import Facts
from megatron.data.sources.source_kinds import RowsSource
from megatron.errors import ConfigError, DataError
from megatron.files.plain import open_plain
from megatron.tokenizers.record import TokenizerRecord, check_same_tokenizer

_IGNORED_LABEL = -100
_CHUNK_TOKENS = 1 << 24
_BLOCK_TOKENS = 1 << 19
_LARGE_GROUP_TOKENS = 8 * _BLOCK_TOKENS
_BATCH_ROWS = 1024
_FOOTER_END_BYTES = 8  # its length (4 bytes, little-endian) and the format's name


@dataclass(frozen=True)
class _Shard:
    """One Parquet file.

    Args:
        starts: first row of each row group, then the number of rows.
        facts: the description of its windows; None if another tool wrote it.
    """

    path: str
    starts: tuple[int, ...]
    facts: WindowFacts | None

    def __len__(self) -> int:
        return self.starts[-1]


class ParquetRows(RowSource):
    """The windows of Parquet files, one file after another.

    Args:
        prefix: a file, a pattern, or the path before the shard number.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: files are missing, hold no windows or no rows, or differ in length.
    """

    reads_chunks = True

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.row_length = 0
        self._shards: list[_Shard] = []
        for path in expand_windows([prefix]):
            with WindowFile(path) as file:
                shard = _Shard(path, (0, *accumulate(file.group_rows)), file.facts)
                if len(shard):
                    self._check_length(path, file.sequence_length)
                    self._shards.append(shard)
        if not self._shards:
            raise DataError(f"{prefix}: its Parquet files hold no windows. Featurize a corpus with text.")
        self._starts = [0, *accumulate(map(len, self._shards))]
        self._warn_of_large_groups()

    @property
    def chunk_rows(self) -> int:
        """Rows of about 16 million tokens."""
        return max(1, _CHUNK_TOKENS // self.row_length)

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """SHA-256 over the footers, which hold the sizes, offsets and extremes of every column chunk."""
        digest = hashlib.sha256()
        for shard in self._shards:
            digest.update(_footer_digest(shard.path))
        return digest.hexdigest()

    @property
    def tokenizers(self) -> tuple[TokenizerRecord, ...]:
        """The tokenizers recorded in the files, without duplicates."""
        records = [shard.facts.tokenizer for shard in self._shards if shard.facts and shard.facts.tokenizer]
        return tuple(dict.fromkeys(records))

    def __len__(self) -> int:
        return self._starts[-1]

    def blocks(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Returns the row groups, larger ones cut into equal blocks of at most half a million tokens."""
        edges = [np.array([first, last])]
        for shard, start in zip(self._shards, self._starts, strict=False):
            for first_row, end in pairwise(shard.starts):
                blocks = -(-(end - first_row) * self.row_length // _BLOCK_TOKENS)
                edges.append(start + np.linspace(first_row, end, blocks + 1).astype(np.int64))
        starts = np.unique(np.concatenate(edges))
        return starts[(starts >= first) & (starts <= last)]

    def read(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Reads rows, decoding each of their row groups once."""
        tokens = np.empty((len(rows), self.row_length + 1), np.int32)
        mask = np.empty((len(rows), self.row_length), np.bool_)
        order = np.argsort(rows)
        bounds = np.searchsorted(rows[order], self._starts)
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            targets = order[bounds[number] : bounds[number + 1]]
            _read_shard(self._shards[number], rows[targets] - self._starts[number], targets, tokens, mask)
        return tokens, mask

    def locate(self, row: int, position: int) -> str:
        number = bisect_right(self._starts, row) - 1
        return f"{self._shards[number].path}: position {position} of row {row - self._starts[number]}"

    def _warn_of_large_groups(self) -> None:
        rows, path = max((int(np.diff(shard.starts).max()), shard.path) for shard in self._shards)
        if rows * self.row_length > _LARGE_GROUP_TOKENS and len(self) > rows:
            fitting = max(1, _BLOCK_TOKENS // self.row_length)
            log.shared_warning(
                f"{path} has {rows} rows in one row group, and reading one row decodes them all: random access is "
                f"slow. Write the files with smaller row groups (pyarrow: row_group_size={fitting})."
            )

    def _check_length(self, path: str, length: int) -> None:
        self.row_length = self.row_length or length
        if length != self.row_length:
            raise DataError(
                f"{path} has windows of {length} tokens, the previous files of {self.prefix} of {self.row_length}. Use "
                "files of equal length, or featurize them again with one --max-sequence-length."
            )


class WindowSource(RowsSource):
    """Windows of tokens in Parquet files."""

    def _check_files(self, sequence_length: int | None) -> None:
        with WindowFile(expand_windows([self.prefix])[0]) as file:
            check_window_length(self.prefix, file.sequence_length, sequence_length or file.sequence_length)

    def facts(self) -> Facts:
        rows = ParquetRows(self.prefix)
        return ("windows", len(rows)), ("tokens_per_window", rows.row_length), ("sha256", rows.fingerprint)

    @property
    def folder(self) -> Path:
        return Path(expand_windows([self.prefix])[0]).parent

    @cached_property
    def _rows(self) -> RowSource:
        rows = ParquetRows(self.prefix)
        check_window_length(self.prefix, rows.row_length, self._request.sequence_length)
        if self._request.tokenizer is not None:
            for record in rows.tokenizers:
                data = f"the data {self.prefix} was created"
                check_same_tokenizer(data, record, self._request.tokenizer, advice=", or preprocess the corpus again")
        return rows


def check_window_length(prefix: str, length: int, sequence_length: int) -> None:
    """Checks that windows are as long as the samples of a run; files without windows have length 0 and pass.

    Raises:
        ConfigError: the lengths differ.
    """
    if length not in (0, sequence_length):
        raise ConfigError(
            f"--seq-length {sequence_length} does not match the windows of {prefix} of {length} tokens. Use "
            f"--seq-length {length}, or featurize the corpus again with --max-sequence-length {sequence_length}."
        )


def _read_shard(
    shard: _Shard,
    rows: npt.NDArray[np.int64],
    targets: npt.NDArray[np.intp],
    tokens: npt.NDArray[np.int32],
    mask: npt.NDArray[np.bool_],
) -> None:
    """Reads sorted rows of one file into the rows `targets` of the result.

    Shapes:
        rows, targets: [n]; tokens: [m, s + 1], mask: [m, s].
    """
    bounds = np.searchsorted(rows, shard.starts)
    with WindowFile(shard.path) as file:
        if (0, *accumulate(file.group_rows)) != shard.starts:
            raise DataError(f"{shard.path}: row groups changed since the run began. Restore the file.")
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            first = shard.starts[group]
            for windows in file.batches(_BATCH_ROWS, group=group):
                start, end = np.searchsorted(rows, (first, first + len(windows.input_ids)))
                if start < end:
                    samples = _samples(shard, windows, first, rows[start:end] - first)
                    tokens[targets[start:end]], mask[targets[start:end]] = samples
                first += len(windows.input_ids)


def _samples(
    shard: _Shard, windows: Windows, first: int, chosen: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Returns tokens [n, s + 1] and masks [n, s] of some of the windows from row `first` on."""
    ignored = _IGNORED_LABEL if shard.facts is None else shard.facts.ignore_label
    is_ahead = shard.facts is None and _labels_are_ahead(windows, ignored)
    ids, attention = windows.input_ids[chosen], windows.attention_mask[chosen] != 0
    labels = np.full((ids.shape[0], ids.shape[1] + 1), ignored)  # [n, s + 1]
    (labels[:, 1:] if is_ahead else labels[:, :-1])[:] = windows.labels[chosen]
    counts = labels != ignored
    last = np.where(counts[:, -1], labels[:, -1], ids[:, -1])
    tokens = np.concatenate([ids, last[:, None]], axis=1)  # [n, s + 1]
    _refuse(shard, first + chosen, counts & (labels != tokens), "a label that is neither its input_id nor the next one")
    _refuse(shard, first + chosen, tokens > LARGEST_ID, f"a label beyond {LARGEST_ID}")
    begins_late = ~attention[:, :1] & attention.any(axis=1, keepdims=True)
    _refuse(shard, first + chosen, begins_late, "padding before its tokens, which the model would read as text")
    attention = np.concatenate([attention, attention[:, -1:]], axis=1)
    return tokens, (counts & attention)[:, 1:]


def _labels_are_ahead(windows: Windows, ignored: int) -> bool:
    """Returns True if labels are shifted: each is at the position of the input before it."""
    free = windows.labels == ignored
    if ((windows.labels == windows.input_ids) | free).all():
        return False
    return bool(((windows.labels[:, :-1] == windows.input_ids[:, 1:]) | free[:, :-1]).all())


def _refuse(shard: _Shard, rows: npt.NDArray[np.int64], wrong: npt.NDArray[np.bool_], what: str) -> None:
    """Raises DataError for the first wrong position."""
    if wrong.any():
        row, position = np.argwhere(wrong)[0].tolist()
        raise DataError(
            f"{shard.path}: row {rows[row]} has {what}, at position {position}. Create the windows again "
            "(tools/corpus/featurize.py) or repair them."
        )


def _footer_digest(path: str) -> bytes:
    with open_plain(path) as stream:
        stream.seek(-_FOOTER_END_BYTES, os.SEEK_END)
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(-_FOOTER_END_BYTES - length, os.SEEK_END)
        return hashlib.sha256(stream.read(length)).digest()
