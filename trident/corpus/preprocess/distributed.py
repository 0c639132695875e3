"""Preprocessing of one corpus on several ranks: each encodes a share, then the shares are merged."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import takewhile
from pathlib import Path

from megatron import log
from megatron.errors import ConfigError, StorageError
from megatron.files.plain import open_plain
from trident.corpus.inputs.hub_rows import HubRows, drawn_rows, is_hub_name, open_rows
from trident.corpus.inputs.input_blocks import check_documents
from trident.corpus.inputs.input_paths import Shard, expand_inputs, share_of
from trident.corpus.inputs.tables import is_saved_data
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.merge import merge, remove_pair
from trident.corpus.preprocess.preprocess_corpus import (
    BLOCK_BYTES,
    PreprocessResult,
    preprocess,
    preprocess_blocks,
    written,
)
from trident.corpus.workers.progress_line import ProgressLine
from trident.corpus.workers.ranks import JobRanks

_COMPARED_BYTES = 1 << 22

Encode = Callable[[str], PreprocessResult]


@dataclass(frozen=True)
class DocumentDraw:
    """The selection and order of documents.

    Args:
        split: of a dataset; None is its training split.
        count: maximum number of documents.
        seed: of the order; with None and `is_shuffled`, one is drawn and logged.
    """

    split: str | None = None
    count: int | None = None
    is_shuffled: bool = False
    seed: int | None = None

    @property
    def is_everything(self) -> bool:
        """True if all documents are taken in order."""
        return self.split is None and self.count is None and not self.is_shuffled


def share_of_rank(
    inputs: Sequence[str], draw: DocumentDraw, options: EncodeOptions, ranks: JobRanks, progress: ProgressLine
) -> Encode:
    """Returns a function that encodes this rank's share of files or drawn rows into pairs of a prefix.

    Raises:
        ConfigError, DataError: the inputs cannot be read, on all ranks.
    """
    if draw.is_everything and not any(is_hub_name(value) or is_saved_data(value) for value in inputs):
        files = expand_inputs(inputs)
        check_documents(files, options.keys)
        share = share_of(files, Shard(ranks.rank + 1, ranks.size))
        return lambda prefix: preprocess(share, prefix, options, 1, progress)
    addresses = [value for value in inputs if "://" in value]
    if addresses:
        raise ConfigError(
            f"--split, --count and --shuffle require files, folders or Hub datasets, but --input {addresses[0]} is a "
            "database. Remove them, or convert its rows to jsonl first."
        )
    named = tuple(inputs) if len(inputs) == 1 and not os.path.isfile(inputs[0]) else expand_inputs(inputs)
    opened: list[HubRows] = []
    ranks.run_on_first(lambda: opened.append(open_rows(named, draw.split)))  # may download it; the others use the cache
    ranks.run_on_all(lambda: None if opened else opened.append(open_rows(named, draw.split)))
    rows = opened[0]
    seed = draw.seed
    if draw.is_shuffled and seed is None:
        seed = ranks.run_on_first(lambda: secrets.randbits(32))
        log.info(f"--shuffle without --seed: --seed {seed} gives this order again.")
    drawn = drawn_rows(rows.rows, draw.count, seed)
    indices = drawn[len(drawn) * ranks.rank // ranks.size : len(drawn) * (ranks.rank + 1) // ranks.size]
    source = rows.drawn_blocks(options.keys, indices, BLOCK_BYTES)
    return lambda prefix: preprocess_blocks(source, prefix, options, 1, progress)


def preprocess_on_ranks(
    encode: Encode, output_prefix: str, options: EncodeOptions, merging: str, scratch: str | None, ranks: JobRanks
) -> PreprocessResult:
    """Runs `encode` on every rank and merges the results; the pairs of the ranks are always removed.

    Args:
        encode: encodes this rank's share, see `share_of_rank`.
        merging: parallel (all ranks write the result), serial (rank 0 does) or both (and the two are compared).
        scratch: folder for the pairs of the ranks; next to the output if None.

    Returns:
        the total of all ranks, on every rank.

    Raises:
        ConfigError, DataError, StorageError, JobError: a rank failed; every rank raises it.
    """
    base = os.path.join(scratch, os.path.basename(output_prefix)) if scratch else output_prefix
    shards = [f"{base}_{rank}" for rank in range(ranks.size)]
    wholes = options.prefixes(output_prefix)

    try:
        ranks.run_on_all(lambda: encode(shards[ranks.rank]).documents)
        for whole, *parts in zip(wholes, *map(options.prefixes, shards), strict=True):
            _merge(parts, whole, f"{base}_serial{whole.removeprefix(output_prefix)}", merging, ranks)
        _, documents, empty, skipped, tokens = ranks.run_on_first(lambda: astuple(written(wholes)))
    finally:
        for part in options.prefixes(shards[ranks.rank]):
            remove_pair(part)
    return PreprocessResult(wholes, documents, tuple(empty), skipped, tuple(tokens))


def _merge(parts: Sequence[str], whole: str, copy: str, merging: str, ranks: JobRanks) -> None:
    """Merges the shares of one key as set by `merging`."""

    def serially(prefix: str) -> Callable[[], int]:
        return lambda: merge(parts, prefix, is_one_corpus=True).index.tokens

    if merging == "serial":
        ranks.run_on_first(serially(whole))
        return
    merge(parts, whole, ranks, is_one_corpus=True)
    if merging == "both":
        try:
            ranks.run_on_first(serially(copy))
            ranks.run_on_first(lambda: _check_same(whole, copy))
        finally:
            if ranks.rank == 0:
                remove_pair(copy)


def _check_same(whole: str, copy: str) -> None:
    """Compares the results of two ways to merge; the first is removed when they differ.

    Raises:
        StorageError: they differ.
    """
    for suffix in ("bin", "idx"):
        offset = _first_difference(Path(f"{whole}.{suffix}"), Path(f"{copy}.{suffix}"))
        if offset is not None:
            remove_pair(whole)
            raise StorageError(
                f"{whole}.{suffix}: the parallel merge differs at byte offset {offset} from the serial one. The file "
                "system loses concurrent writes of several nodes to one file; use --merge serial. "
                f"{whole} was removed."
            )
    log.info(f"{whole} (.bin, .idx): parallel and serial merge are equal.")


def _first_difference(path: Path, other: Path) -> int | None:
    offset = 0
    with open_plain(path) as first, open_plain(other) as second:
        while True:
            here, there = first.read(_COMPARED_BYTES), second.read(_COMPARED_BYTES)
            if here != there:
                equal = (ours == theirs for ours, theirs in zip(here, there, strict=False))
                return offset + sum(takewhile(bool, equal))
            if not here:
                return None
            offset += len(here)
