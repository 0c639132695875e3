"""Pairs of inputs and targets as training rows: several per row, which do not attend to each other.

Row i of `PREFIX_inputs_document` belongs to row i of `PREFIX_targets_document`. Attention to inputs is bidirectional,
and only target tokens have a loss.

Source: bigscience Megatron-DeepSpeed `megatron/data/mtf_dataset.py` and `megatron/data/decoder_packed_mtf_dataset.py`.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron import log
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.sidecar import read_sidecar
from megatron.data.order.index_cache import IndexCache, description_sha256
from megatron.data.order.packing import Packing, pack
from megatron.data.order.row_order import RowSource
from megatron.errors import DataError

PAIR_FIELDS = ("inputs", "targets")


def pair_prefixes(prefix: str) -> tuple[str, str]:
    """Returns the prefixes of the two token files."""
    inputs, targets = (f"{prefix}_{field}_document" for field in PAIR_FIELDS)
    return inputs, targets


def names_pairs(prefix: str) -> bool:
    """Returns True if a prefix names pairs: inputs or targets exist, but no token file of that prefix."""
    return not Path(f"{prefix}.idx").is_file() and any(Path(f"{part}.idx").is_file() for part in pair_prefixes(prefix))


class TokenPairs:
    """Inputs and targets by index.

    Raises:
        DataError: a file is missing or damaged, or the numbers of inputs and targets differ.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.inputs, self.targets = (IndexedDataset(part) for part in pair_prefixes(prefix))
        if len(self.inputs) != len(self.targets):
            raise DataError(
                f"{self.inputs.prefix} has {len(self.inputs)} sequences and {self.targets.prefix} has "
                f"{len(self.targets)}; the numbers must be equal. Preprocess both from the same records: "
                f"tools/preprocess_data.py --json-keys {' '.join(PAIR_FIELDS)}."
            )
        for part in pair_prefixes(prefix):
            sidecar = read_sidecar(part)
            if sidecar is not None and sidecar.empty:
                log.shared_warning(
                    f"{sidecar.empty} records without tokens were skipped in {part}. Unless the same ones are missing "
                    "on the other side, inputs and targets do not match: preprocess with --append-eod."
                )

    def __len__(self) -> int:
        return len(self.inputs)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.inputs.fingerprint} {self.targets.fingerprint}".encode()).hexdigest()


class PackedPairs(RowSource):
    """Rows filled with the pairs [first, last); each epoch has the same rows in another order.

    Args:
        sequence_length: inputs of a sample.
        seed: of the shuffle before packing.
        padding_id: fills the rest of a row.
        cache: stores the packing.

    Raises:
        DataError: no pair is short enough for a row.
    """

    def __init__(
        self,
        pairs: TokenPairs,
        first: int,
        last: int,
        sequence_length: int,
        seed: int,
        padding_id: int,
        cache: IndexCache,
    ) -> None:
        self.prefix = pairs.prefix
        self._pairs = pairs
        self._first = first
        self._length = sequence_length + 1
        self._padding_id = padding_id
        description = {
            "pairs_sha256": pairs.fingerprint,
            "first": first,
            "last": last,
            "sequence_length": sequence_length,
            "seed": seed,
        }
        self.fingerprint = description_sha256(description)
        lengths = pairs.inputs.lengths[first:last].astype(np.int64) + pairs.targets.lengths[first:last]
        arrays = cache.arrays("packed", description, lambda: pack(lengths, self._length, seed)._asdict())
        self._packing = Packing(arrays["order"], arrays["rows"])
        if skipped := self._packing.skipped:
            self._warn_or_refuse(skipped, int(lengths.max()))

    def __len__(self) -> int:
        return len(self._packing.rows)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        tokens = np.full((len(rows), self._length), self._padding_id, np.int64)
        segments = np.zeros(tokens.shape, np.int64)
        is_input, is_target = np.zeros(tokens.shape, np.bool_), np.zeros(tokens.shape, np.bool_)
        for index, row in enumerate(rows.tolist()):
            end = 0
            for number, pair in enumerate(self._pairs_of(row)):
                for source, mark in ((self._pairs.inputs, is_input), (self._pairs.targets, is_target)):
                    ids = source.get(pair)
                    target = slice(end, end + len(ids))
                    tokens[index, target], segments[index, target], mark[index, target] = ids, number, True
                    end = target.stop
            segments[index, end:] = len(self._pairs_of(row))
        loss_mask = is_target[:, 1:] & (segments[:, 1:] == segments[:, :-1])
        return tokens, loss_mask, segments[:, :-1], is_input[:, :-1]

    def locate(self, row: int, position: int) -> str:
        end = 0
        for pair in self._pairs_of(row):
            for source in (self._pairs.inputs, self._pairs.targets):
                start, end = end, end + int(source.lengths[pair])
                if position < end:
                    return f"{source.bin_path}: token {position - start} of sequence {pair}"
        return f"{self.prefix}: padding at {position} of row {row}"

    def _pairs_of(self, row: int) -> list[int]:
        first, last = self._packing.rows[row].tolist()
        return (self._first + self._packing.order[first:last]).tolist()  # type: ignore[no-any-return]

    def _warn_or_refuse(self, skipped: int, longest: int) -> None:
        count = len(self._packing.order)
        text = (
            f"{skipped} of {count} pairs of {self.prefix} have more than the {self._length} tokens of a row, the "
            f"longest {longest}"
        )
        if not len(self):
            raise DataError(f"{text}, so none is left to train on. Use --seq-length {longest - 1}.")
        log.shared_warning(f"{text}; they are skipped. Increase --seq-length to keep them.")
