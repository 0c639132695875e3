"""Random token ids as rows of training: for runs that measure speed or memory and need no corpus."""

import numpy as np

from megatron.data.order.index_cache import description_sha256
from megatron.data.order.row_order import RowSource

RANDOM_ROWS = 100_000  # as many as Megatron-LM's MockGPTLowLevelDataset has documents


class RandomRows(RowSource):
    """Rows of ids that follow from the seed and the row's number alone, so that no layout or resume changes them."""

    def __init__(self, prefix: str, vocab_size: int, sequence_length: int, seed: int) -> None:
        self.prefix = prefix
        self._vocab_size, self._length, self._seed = vocab_size, sequence_length + 1, seed
        self.fingerprint = description_sha256({"ids": vocab_size, "length": sequence_length, "seed": seed})

    def __len__(self) -> int:
        return RANDOM_ROWS

    def read(self, rows: np.ndarray) -> tuple[np.ndarray]:
        # Unlike default_rng, RandomState draws the same in every version of NumPy.
        drawn = (np.random.RandomState([self._seed, row]) for row in rows.tolist())
        return (np.stack([each.randint(self._vocab_size, size=self._length, dtype=np.int64) for each in drawn]),)

    def locate(self, row: int, position: int) -> str:
        return f"{self.prefix} token {position} of random row {row}"
