"""MinHash signatures: the share of equal entries of two vectors estimates the overlap of the texts' word runs.

Source: Broder 1997, On the resemblance and containment of documents; banding: Leskovec, Rajaraman and Ullman, Mining of
Massive Datasets, § 3.4; 16 of 32 bits are kept: Li and König 2010, b-Bit Minwise Hashing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError
from trident.corpus.cleaning.documents.clean_options import NearChoice
from trident.corpus.cleaning.documents.words import Hashes, Words, WordSplitter, mixed

# At least this share of document pairs at the threshold have a band in common.
_LEAST_MEETING_SHARE = 0.95
_ROW_BASE = 0x9E3779B97F4A7C15
_UPDATE_SHINGLES = 1024


class Signer:
    """Signs texts.

    Raises:
        ConfigError: datasketch is not installed.
    """

    def __init__(self, choice: NearChoice) -> None:
        try:
            import datasketch
        except ImportError as failure:
            raise ConfigError("--near-duplicates requires the datasketch package: pip install datasketch.") from failure
        self._choice = choice
        self._minhash = datasketch.MinHash(choice.permutations, seed=choice.seed, hashfunc=_itself, scheme="affine32")
        self._letters = WordSplitter(each_character=True) if choice.unit == "character" else None

    def sign(self, texts: Sequence[str], words: Words) -> tuple[npt.NDArray[np.uint16], Hashes]:
        """Returns signatures, and the keys of their bands; the keys of a text without words are 0.

        Args:
            words: of the texts, as `WordSplitter` finds them.

        Shapes:
            uint16 [texts, permutations]; uint64 [texts, bands].
        """
        choice = self._choice
        if self._letters is not None:
            words = self._letters.split(texts)
        hashes, bounds = words.shingles(choice.shingle)
        halves = (hashes >> np.uint64(32)).astype(np.uint32)
        signatures = np.zeros((len(texts), choice.permutations), np.uint32)
        for number, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            if start < stop:
                signatures[number] = self._signature(halves[start:stop])
        keys = band_keys(signatures, *band_shape(choice.permutations, choice.threshold))
        keys[np.diff(bounds) == 0] = 0
        return signatures.astype(np.uint16), keys

    def _signature(self, hashes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        self._minhash.clear()
        for start in range(0, len(hashes), _UPDATE_SHINGLES):
            # One element that is an array: the library would take numbers one by one, at twice the time.
            self._minhash.update_batch([hashes[start : start + _UPDATE_SHINGLES]])
        return np.asarray(self._minhash.hashvalues)


def band_shape(permutations: int, threshold: float) -> tuple[int, int]:
    """Returns the number of bands and of rows per band: as many rows as still satisfy `_LEAST_MEETING_SHARE`."""
    best = (permutations, 1)
    for rows in range(2, permutations + 1):
        bands = permutations // rows
        if 1 - (1 - threshold**rows) ** bands >= _LEAST_MEETING_SHARE:
            best = (bands, rows)
    return best


def band_keys(signatures: npt.NDArray[np.uint32], bands: int, rows: int) -> Hashes:
    """Returns a non-zero key for each band; equal values in different bands have different keys.

    Shapes:
        uint32 [n, permutations] -> uint64 [n, bands].
    """
    values = signatures[:, : bands * rows].reshape(len(signatures), bands, rows).astype(np.uint64)
    keys = np.broadcast_to(mixed(np.arange(1, bands + 1, dtype=np.uint64)), values.shape[:2])
    for row in range(rows):
        keys = keys * np.uint64(_ROW_BASE) + values[:, :, row]
    return np.maximum(mixed(keys), np.uint64(1))


def _itself(value: Any) -> Any:
    return value
