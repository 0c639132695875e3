"""Small token files for the tests of the data package, their sidecars and their digests."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.formats.sidecar import Sidecar, sidecar_path, write_temporary_sidecar

GOLDEN_LENGTHS = [5, 9, 3, 12, 7, 1, 20, 4, 8, 11]


def write_corpus(prefix: Path, lengths: Sequence[int], first_id: int = 0, dtype: type[np.integer] = np.int32) -> str:
    """Writes documents of the given lengths whose token ids count up from `first_id`, so that every id occurs once."""
    tokens = np.arange(first_id, first_id + sum(lengths), dtype=np.int64)
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_batch(tokens, lengths)
    return str(prefix)


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Writes the sidecar of a data prefix."""
    os.replace(write_temporary_sidecar(prefix, sidecar), sidecar_path(prefix))


def md5(array: np.ndarray) -> str:
    """The MD5 digest of an array's bytes, which stands for a golden array."""
    return hashlib.md5(array.tobytes()).hexdigest()
