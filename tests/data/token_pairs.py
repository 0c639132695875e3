"""Small token files of inputs and targets for tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.sources.pairs import pair_prefixes

TARGET = (
    10_000  # ids of targets begin here; those of pair p are 100 (p + 1) and so on for inputs, TARGET more for targets
)


def write_pairs(prefix: Path, lengths: Sequence[tuple[int, int]]) -> str:
    """Writes pairs with inputs and targets of these lengths, each id once."""
    for part, path in enumerate(pair_prefixes(str(prefix))):
        with IndexedWriter(path, np.int32) as writer:
            for number, pair in enumerate(lengths):
                writer.add_document([token_ids(number, part, pair[part])])
    return str(prefix)


def token_ids(number: int, part: int, length: int) -> np.ndarray:
    """The ids of a pair's inputs (part 0) or targets (part 1)."""
    return TARGET * part + 100 * (number + 1) + np.arange(length)
