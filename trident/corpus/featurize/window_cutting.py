"""Cuts documents into windows of equal length: offsets, and rows of ids, masks and labels.

The windows of a document start every `stride` tokens, until one reaches its end; all but the last hold
`tokens_per_window` tokens. Every token is in at least one window, unless short windows are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.formats.parquet_windows import WindowFacts, Windows
from megatron.errors import DataError

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cutting:
    """The parameters for cutting windows.

    Args:
        shortest: minimum positions of a window, special tokens included; windows below it are short.
        drop_short: drop short windows, with the tokens that no other window holds.
        positions_at_once: approximate positions per row group.
    """

    facts: WindowFacts
    shortest: int = 1
    drop_short: bool = False
    positions_at_once: int = 1 << 19

    @property
    def rows_at_once(self) -> int:
        return max(1, self.positions_at_once // self.facts.sequence_length)


@dataclass(frozen=True)
class Tally:
    """Counts of the cut windows.

    Args:
        documents: with tokens.
        tokens: of the documents.
        windows: rows written.
        repeated: positions with a token that is also in the previous window.
        special: positions with a begin or end token.
        padded: positions with padding.
        short: windows below the minimum length; `dropped_windows` of them were dropped.
        dropped: tokens in no window.
    """

    documents: int = 0
    tokens: int = 0
    windows: int = 0
    repeated: int = 0
    special: int = 0
    padded: int = 0
    short: int = 0
    dropped_windows: int = 0
    dropped: int = 0

    @property
    def kept(self) -> int:
        """Tokens in at least one window."""
        return self.tokens - self.dropped

    def __add__(self, other: Tally) -> Tally:
        mine, theirs = asdict(self), asdict(other)
        return Tally(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True)
class Documents:
    """Consecutive documents in a stream of tokens.

    Shapes:
        lengths, starts: int64 [documents].

    Args:
        lengths: in tokens, without removed begin and end ids.
        starts: offset of each in the stream, likewise.
        read: returns the tokens [start, stop) of the stream.
        name: of the source, for errors.
        first: index of the first one in the source.
    """

    lengths: Numbers
    starts: Numbers
    read: Callable[[int, int], npt.NDArray[np.integer]]
    name: str
    first: int = 0


def documents_of(
    facts: WindowFacts,
    lengths: Numbers,
    read: Callable[[int, int], npt.NDArray[np.integer]],
    name: str,
    first: int = 0,
) -> Documents:
    """Returns consecutive documents from the beginning of a stream, without removed ids.

    Shapes:
        lengths: int64 [documents], in tokens of the stream.
    """
    before, after = _removed(facts)
    starts = np.cumsum(lengths) - lengths + before
    return Documents(np.maximum(lengths - before - after, 0), starts, read, name, first)


def window_counts(cutting: Cutting, lengths: Numbers) -> Numbers:
    """Returns the number of windows of each document.

    Shapes:
        lengths: int64 [documents], in tokens -> int64 [documents].
    """
    counts = _all_counts(cutting, lengths)
    return counts - _is_short(cutting, lengths, counts) if cutting.drop_short else counts


def tally(cutting: Cutting, lengths: Numbers) -> Tally:
    """Counts the windows of documents of these lengths.

    Shapes:
        lengths: int64 [documents].
    """
    facts = cutting.facts
    room, stride = facts.tokens_per_window, facts.stride
    every = _all_counts(cutting, lengths)
    short = _is_short(cutting, lengths, every)
    counts = every - short if cutting.drop_short else every
    reach = np.minimum(np.maximum(counts - 1, 0) * stride + room, lengths) * (counts > 0)
    windows, kept = int(counts.sum()), int(reach.sum())
    held = int(((counts - 1) * room + reach - (counts - 1) * stride)[counts > 0].sum())
    special = windows * facts.special_tokens
    return Tally(
        documents=int(np.count_nonzero(lengths)),
        tokens=int(lengths.sum()),
        windows=windows,
        repeated=held - kept,
        special=special,
        padded=windows * facts.sequence_length - held - special,
        short=int(np.count_nonzero(short)),
        dropped_windows=int(np.count_nonzero(short)) if cutting.drop_short else 0,
        dropped=int(lengths.sum()) - kept,
    )


def cut(
    cutting: Cutting, documents: Documents, first: int = 0, last: int | None = None
) -> Iterator[tuple[Windows, Numbers]]:
    """Yields the windows [first, last) of documents, a bounded number at once, with their offsets.

    Shapes:
        the offsets: int64 [windows].

    Raises:
        DataError: an id is negative, or a document lacks the begin or end id to remove.
    """
    facts, lengths = cutting.facts, documents.lengths
    before, after = _removed(facts)
    counts = window_counts(cutting, lengths)
    ends = np.cumsum(counts)
    last = int(counts.sum()) if last is None else last
    while first < last:
        rows = np.arange(first, min(first + cutting.rows_at_once, last))
        owners = np.searchsorted(ends, rows, side="right")
        numbers = rows - (ends - counts)[owners]
        offsets = numbers * facts.stride
        sizes = np.minimum(lengths[owners] - offsets, facts.tokens_per_window)
        starts = documents.starts[owners] + offsets
        start, stop = int(starts[0]) - before, int((starts + sizes).max()) + after
        tokens = documents.read(start, stop)
        if tokens.dtype.kind == "i" and tokens.min() < 0:
            raise DataError(
                f"{documents.name} holds the id {tokens.min()} in documents {documents.first + owners[0]} to "
                f"{documents.first + owners[-1]}; ids must not be negative. The file is damaged or holds no tokens."
            )
        starts -= start
        if facts.document_begin is not None:
            _check_id(documents, "begins", facts.document_begin, owners, tokens[starts - 1], offsets == 0)
        if facts.document_end is not None:
            at_end = offsets + sizes == lengths[owners]
            _check_id(documents, "ends", facts.document_end, owners, tokens[(starts + sizes) * at_end], at_end)
        yield _rows(facts, tokens, starts, sizes, numbers > 0), offsets
        first += len(rows)


def regrouped(groups: Iterable[tuple[Windows, Numbers]], size: int) -> Iterator[tuple[Windows, Numbers]]:
    """Regroups windows in groups of at most `size` rows to groups of exactly `size`, except for the last."""
    held: list[tuple[Windows, Numbers]] = []
    count = 0
    for group in groups:
        held.append(group)
        count += len(group[1])
        if count >= size:
            whole = _joined(held)
            yield _part(whole, slice(0, size))
            held = [_part(whole, slice(size, count))] if count > size else []
            count -= size
    if count:
        yield _joined(held)


def _joined(groups: Sequence[tuple[Windows, Numbers]]) -> tuple[Windows, Numbers]:
    if len(groups) == 1:
        return groups[0]
    windows = Windows(
        np.concatenate([group.input_ids for group, _ in groups]),
        np.concatenate([group.attention_mask for group, _ in groups]),
        np.concatenate([group.labels for group, _ in groups]),
    )
    return windows, np.concatenate([offsets for _, offsets in groups])


def _part(group: tuple[Windows, Numbers], rows: slice) -> tuple[Windows, Numbers]:
    windows, offsets = group
    return Windows(windows.input_ids[rows], windows.attention_mask[rows], windows.labels[rows]), offsets[rows]


def _removed(facts: WindowFacts) -> tuple[int, int]:
    """Returns the number of ids removed before and after every document."""
    return int(facts.document_begin is not None), int(facts.document_end is not None)


def _check_id(
    documents: Documents,
    what: str,
    expected: int,
    owners: Numbers,
    ids: npt.NDArray[Any],
    counts: npt.NDArray[np.bool_],
) -> None:
    wrong = np.flatnonzero(counts & (ids != expected))
    if len(wrong):
        raise DataError(
            f"{documents.name}: document {documents.first + owners[wrong[0]]} {what} with the id {ids[wrong[0]]}, "
            f"expected {expected} by its tokenizer or the --append-eod in its description {documents.name}.json. "
            "Preprocess the corpus again, or remove the description."
        )


def _all_counts(cutting: Cutting, lengths: Numbers) -> Numbers:
    beyond = np.maximum(lengths - cutting.facts.tokens_per_window, 0)
    return (lengths > 0) + -(-beyond // cutting.facts.stride)


def _is_short(cutting: Cutting, lengths: Numbers, counts: Numbers) -> npt.NDArray[np.bool_]:
    """Returns a mask of the documents whose last window is short."""
    last_size = lengths - (counts - 1) * cutting.facts.stride
    return (counts > 0) & (last_size + cutting.facts.special_tokens < cutting.shortest)


def _rows(
    facts: WindowFacts,
    tokens: npt.NDArray[np.integer],
    starts: Numbers,
    sizes: Numbers,
    goes_on: npt.NDArray[np.bool_],
) -> Windows:
    """Builds rows with special tokens and padding.

    Shapes:
        starts, sizes, goes_on: [n], offset of a window in `tokens`, its number of tokens, and True if it follows
        another one of the document.
    """
    rows, before = np.arange(len(starts)), facts.before
    indices = starts[:, None] + np.arange(facts.tokens_per_window)  # [n, tokens_per_window]
    ids = np.full((len(starts), facts.sequence_length), facts.pad_id, dtype=np.int64)
    ids[:, before : before + facts.tokens_per_window] = tokens[np.minimum(indices, len(tokens) - 1)]
    if facts.bos_id is not None and before:
        ids[:, 0] = facts.bos_id
    positions = np.arange(facts.sequence_length)
    used = positions < (sizes + facts.special_tokens)[:, None]  # [n, s]
    ids[~used] = facts.pad_id
    if facts.eos_id is not None and facts.special_tokens:
        ids[rows, before + sizes] = facts.eos_id
    labels = np.where(used, ids, facts.ignore_label)
    if facts.mask_overlap:
        seen = np.minimum(facts.tokens_per_window - facts.stride, sizes) * goes_on
        labels[(positions >= before) & (positions < (before + seen)[:, None])] = facts.ignore_label
    return Windows(ids, used.astype(np.float32), labels)
