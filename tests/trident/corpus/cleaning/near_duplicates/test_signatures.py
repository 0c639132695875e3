"""MinHash signatures and their bands."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from megatron.errors import ConfigError
from tests.trident.corpus.cleaning.texts import random_text, vocabulary
from trident.corpus.cleaning.documents.clean_options import NearChoice
from trident.corpus.cleaning.documents.words import WordSplitter
from trident.corpus.cleaning.near_duplicates.signatures import Signer, band_keys, band_shape

datasketch = pytest.importorskip("datasketch", reason="the datasketch package is not installed")


WORDS = vocabulary()


def test_signatures_are_those_of_the_library() -> None:
    choice = NearChoice(permutations=64)
    signer = Signer(choice)
    text = random_text(random.Random(8), WORDS, 3000)
    hashes, _ = WordSplitter().split([text]).shingles(5)
    plain = datasketch.MinHash(64, seed=choice.seed, hashfunc=lambda value: int(value) >> 32, scheme="affine32")
    for value in hashes.tolist():
        plain.update(value)
    texts = [text, "", text + " more"]
    signatures, keys = signer.sign(texts, WordSplitter().split(texts))
    assert np.array_equal(signatures[0], plain.hashvalues.astype(np.uint16))
    assert keys[0].all() and not keys[1].any()
    assert np.mean(signatures[0] == signatures[2]) > 0.9


@pytest.mark.parametrize(("threshold", "shape"), [(0.7, (25, 5)), (0.8, (18, 7)), (0.5, (42, 3)), (1.0, (1, 128))])
def test_bands_match_the_threshold(threshold: float, shape: tuple[int, int]) -> None:
    bands, rows = band_shape(128, threshold)
    assert (bands, rows) == shape
    assert 1 - (1 - threshold**rows) ** bands >= 0.95


def test_bands_of_equal_values_have_keys_of_their_own() -> None:
    keys = band_keys(np.full((2, 12), 7, np.uint32), 4, 3)
    assert len(set(keys[0].tolist())) == 4 and np.array_equal(keys[0], keys[1])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ConfigError, match=r"--near-duplicates requires the datasketch package: pip install datasketch"):
        Signer(NearChoice())
