"""Converts windows in Parquet files back to a `.bin/.idx` pair.

For files of `tools/corpus/featurize.py` the original documents are restored: special tokens, padding and overlaps are
removed. For files of other tools each window becomes a document with all ids selected by its mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.formats.indexed_writer import IndexedWriter, width_for
from megatron.data.formats.parquet_windows import WindowFacts, WindowFile, Windows
from megatron.data.formats.sidecar import check_replaceable
from megatron.data.formats.window_names import expand_windows
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import add_special_tokens
from trident.corpus.featurize.window_cutting import Numbers
from trident.corpus.inputs.block import InputBlock
from trident.corpus.preprocess.provenance import SourceLog, versions

_POSITIONS_AT_ONCE = 1 << 19


@dataclass(frozen=True)
class BackResult:
    """The outcome of a conversion.

    Args:
        whole: the original documents were restored; otherwise each window is one.
        empty: skipped windows without a token.
    """

    documents: int
    tokens: int
    windows: int
    empty: int
    whole: bool


def windows_to_tokens(
    values: Sequence[str], output_prefix: str, tokenizer: TokenizerRecord | None = None, append_eod: bool = False
) -> BackResult:
    """Writes the documents of Parquet windows into a pair and, if the tokenizer is known, its description.

    Args:
        values: files, patterns, or the path before the shard number.
        tokenizer: of the ids, if the files do not record it.
        append_eod: end every document with the end-of-document id; always true if documents had it before.

    Raises:
        ConfigError: the end-of-document id is unknown, or pyarrow is missing.
        DataError: a file is damaged, holds no windows, or does not match the others.
        StorageError: the outputs cannot be written.
    """
    paths = expand_windows(values)
    check_replaceable(output_prefix)
    facts = _facts_of_all(paths)
    record = _tokenizer_of(facts, tokenizer, paths[0])
    begin = facts.document_begin if facts is not None else None
    end = facts.document_end if facts is not None else None
    if append_eod and end is None:
        end = None if record is None else record.eod_id
        if end is None:
            raise ConfigError(
                f"--append-eod: {paths[0]} does not record the end-of-document id. Set its tokenizer, or remove "
                "--append-eod."
            )
    vocab_size = None if record is None else record.vocab_size
    log = SourceLog()
    windows = empty = 0
    with IndexedWriter(output_prefix, width_for(vocab_size)) as writer:
        for tokens, lengths in _documents(paths, facts, vocab_size):
            kept = lengths[lengths > 0]
            empty += len(lengths) - len(kept)
            if begin is not None or end is not None:
                around = [[] if token is None else [token] for token in (begin, end)]
                tokens, kept = add_special_tokens(tokens, kept, around[0], around[1])
            writer.add_batch(tokens, kept)
        for path in paths:
            with WindowFile(path) as file:
                windows += file.rows
            list(log.watch([InputBlock(path, 0, 0, None, 0, "parquet")]))
        if record is not None:
            has_end = end is not None and end == record.eod_id
            writer.describe(record, versions(), log.records(), append_eod=has_end, empty=empty)
        return BackResult(writer.document_count, writer.tokens, windows, empty, facts is not None)


def _facts_of_all(paths: Sequence[str]) -> WindowFacts | None:
    """Returns the window parameters of all files.

    Raises:
        DataError: the files differ.
    """
    first = None
    for path in paths:
        with WindowFile(path) as file:
            facts = file.facts if file.offsets is not None else None
        if path == paths[0]:
            first = facts
        elif facts != first:
            raise DataError(
                f"{path} and {paths[0]} differ in windows, special tokens or tokenizer, so they are not one corpus. "
                "Convert them one by one."
            )
    return first


def _tokenizer_of(facts: WindowFacts | None, given: TokenizerRecord | None, path: str) -> TokenizerRecord | None:
    made_with = facts.tokenizer if facts is not None else None
    if made_with is None or given is None:
        return made_with or given
    if not made_with.is_of(given):
        raise DataError(
            f"{path} was made with another tokenizer ({made_with.name}, {made_with.vocab_size} tokens) than the one "
            f"given ({given.name}, {given.vocab_size} tokens). Use the same one, or none: the file records it."
        )
    return replace(made_with, eod_id=given.eod_id if made_with.eod_id is None else made_with.eod_id)


def _documents(
    paths: Sequence[str], facts: WindowFacts | None, vocab_size: int | None
) -> Iterator[tuple[npt.NDArray[Any], Numbers]]:
    """Yields the documents of all files in order: concatenated tokens, and the length of each."""
    assembly = None if facts is None else _Assembly(facts)
    for path in paths:
        with WindowFile(path) as file:
            first = 0
            rows = max(1, _POSITIONS_AT_ONCE // max(1, file.sequence_length))
            for windows in file.batches(rows, vocab_size):
                count = len(windows.input_ids)
                if assembly is None or file.offsets is None:
                    kept = windows.attention_mask == 1
                    yield windows.input_ids[kept], kept.sum(axis=1)
                else:
                    yield assembly.add(windows, file.offsets[first : first + count], f"{path}: row {{}}", first)
                first += count
    if assembly is not None:
        yield assembly.rest()


class _Assembly:
    """Reassembles documents from their windows incrementally.

    Shapes:
        body: [rows, tokens_per_window], the tokens of windows without begin and end ids.
    """

    def __init__(self, facts: WindowFacts) -> None:
        self._facts = facts
        self._last: tuple[npt.NDArray[np.int64], int, int] | None = None  # body, offset and size of the last window
        self._unfinished: list[npt.NDArray[np.int32]] = []  # tokens of an incomplete document

    def add(
        self, windows: Windows, offsets: Numbers, where: str, first: int
    ) -> tuple[npt.NDArray[np.integer], Numbers]:
        """Adds windows and returns the complete documents.

        Raises:
            DataError: the windows do not continue the previous ones, or their overlap differs.
        """
        facts = self._facts
        body = windows.input_ids[:, facts.before : facts.before + facts.tokens_per_window]
        sizes = windows.attention_mask.sum(axis=1).astype(np.int64) - facts.special_tokens
        columns = np.arange(facts.tokens_per_window)
        positions = np.arange(facts.sequence_length)
        filled = (windows.attention_mask == 1) == (positions < (sizes + facts.special_tokens)[:, None])
        _refuse(~filled.all(axis=1) | (sizes < 1), where, first, "has a mask other than tokens first, then padding")
        earlier_body, earlier_offsets, earlier_sizes = self._shifted(body, offsets, sizes)
        goes_on = offsets > 0
        shared = np.where(goes_on, earlier_offsets + earlier_sizes - offsets, 0)
        gap = goes_on & ((shared < 0) | (shared > sizes) | (offsets <= earlier_offsets))
        _refuse(gap | (offsets < 0), where, first, "does not continue the previous window: shards or rows are missing")
        indices = np.minimum(columns + np.where(goes_on, offsets - earlier_offsets, 0)[:, None], len(columns) - 1)
        differs = (np.take_along_axis(earlier_body, indices, axis=1) != body) & (columns < shared[:, None])
        _refuse(differs.any(axis=1), where, first, "differs from the previous window where both overlap")
        self._last = (body[-1], int(offsets[-1]), int(sizes[-1]))
        new = (columns >= shared[:, None]) & (columns < sizes[:, None])
        return self._complete(body[new], sizes - shared, np.flatnonzero(~goes_on))

    def rest(self) -> tuple[npt.NDArray[np.integer], Numbers]:
        """Returns the last document, after all windows."""
        tokens = np.concatenate([*self._unfinished, np.empty(0, np.int32)])
        return tokens, np.array([len(tokens)] if len(tokens) else [], dtype=np.int64)

    def _shifted(
        self, body: npt.NDArray[np.int64], offsets: Numbers, sizes: Numbers
    ) -> tuple[npt.NDArray[np.int64], Numbers, Numbers]:
        """Returns the previous window of each window."""
        before = (np.zeros_like(body[0]), -1, 0) if self._last is None else self._last
        return (
            np.concatenate([before[0][None], body[:-1]]),
            np.concatenate([[before[1]], offsets[:-1]]),
            np.concatenate([[before[2]], sizes[:-1]]),
        )

    def _complete(
        self, tokens: npt.NDArray[np.int64], counts: Numbers, starts: Numbers
    ) -> tuple[npt.NDArray[np.integer], Numbers]:
        """Splits new tokens at the rows that begin a document; keeps the tokens of the last one."""
        if not len(starts):
            self._unfinished.append(tokens.astype(np.int32))  # a document may be long
            return tokens[:0], counts[:0]
        ends = np.concatenate([[0], np.cumsum(counts)])[starts]
        open_tokens = sum(map(len, self._unfinished))
        lengths = np.diff(np.concatenate([[-open_tokens], ends]))
        complete = np.concatenate([*self._unfinished, tokens[: ends[-1]]])
        self._unfinished = [tokens[ends[-1] :].astype(np.int32)]
        return complete, lengths if lengths[0] else lengths[1:]


def _refuse(wrong: npt.NDArray[np.bool_], where: str, first: int, what: str) -> None:
    if wrong.any():
        row = first + int(np.flatnonzero(wrong)[0])
        raise DataError(f"{where.format(row)} {what}. The file is damaged: download or create it again.")
