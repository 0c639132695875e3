"""Small token files for the tests of the data package."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.data.formats.indexed_writer import IndexedWriter

GOLDEN_LENGTHS = [5, 9, 3, 12, 7, 1, 20, 4, 8, 11]


def write_corpus(prefix: Path, lengths: Sequence[int], first_id: int = 0, dtype: type[np.integer] = np.int32) -> str:
    """Writes documents of the given lengths whose token ids count up from `first_id`, so that every id occurs once."""
    tokens = np.arange(first_id, first_id + sum(lengths), dtype=np.int64)
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_batch(tokens, lengths)
    return str(prefix)
