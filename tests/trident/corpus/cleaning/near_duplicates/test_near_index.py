"""Near duplicates are found, others stay, and memory and results are what is promised."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.trident.corpus.cleaning.runs import clean_texts
from tests.trident.corpus.cleaning.texts import jaccard, mutated, random_text, vocabulary
from trident.corpus.cleaning.documents.clean_options import CleanOptions, NearChoice
from trident.corpus.cleaning.near_duplicates import near_index as near_duplicates
from trident.corpus.cleaning.near_duplicates.near_index import NearIndex

WORDS = vocabulary()
NEAR = CleanOptions(near=NearChoice())


def test_near_duplicates_are_found_and_others_are_kept(tmp_path: Path) -> None:
    drawn = random.Random(5)
    originals = [random_text(drawn, WORDS, drawn.randint(60, 400)) for _ in range(150)]
    copies = []
    for text in originals:
        count = len(text.split())
        copy = mutated(drawn, text, WORDS, max(1, count // 60))
        while jaccard(text, copy) < 0.8:
            copy = mutated(drawn, text, WORDS, 1)
        copies.append(copy)
    strangers = [mutated(drawn, text, WORDS, len(text.split()) // 5) for text in originals]
    assert max(map(jaccard, originals, strangers)) < 0.5
    kept, report = clean_texts(tmp_path, originals + copies + strangers, NEAR, block_bytes=100_000)
    stayed = set(kept)
    assert all(text in stayed for text in originals)
    assert sum(copy in stayed for copy in copies) <= 0.05 * len(copies)
    assert all(text in stayed for text in strangers)
    example = report.dropped["near duplicate"].examples[0]
    assert example["where"].endswith(":151") and example["detail"].endswith(":1") and "like" in example["detail"]


def test_the_first_of_a_chain_is_kept(tmp_path: Path) -> None:
    drawn = random.Random(6)
    first = random_text(drawn, WORDS, 200)
    versions = [first]
    for _ in range(20):
        versions.append(mutated(drawn, versions[-1], WORDS, 2))
    kept, _ = clean_texts(tmp_path, versions, NEAR)
    assert kept[0] == first and 2 <= len(kept) < 8
    assert max(jaccard(one, other) for one in kept for other in kept if one is not other) < 0.85


def test_letters_and_short_texts(tmp_path: Path) -> None:
    texts = ["Yes, it is.", "yes it IS", "no", "!!!", "???", "yes it", "漢字漢字", "漢字、漢字。"]
    assert clean_texts(tmp_path, texts, NEAR)[0] == ["Yes, it is.", "no", "!!!", "???", "yes it", "漢字漢字"]
    letters = CleanOptions(near=NearChoice(unit="character", shingle=3, threshold=0.5))
    assert clean_texts(tmp_path, ["abcdefghij", "abcdefghxj", "klmnopqrst"], letters)[0] == ["abcdefghij", "klmnopqrst"]


def test_the_result_does_not_depend_on_blocks_and_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "_MOST_COMPARED", 3)
    drawn = random.Random(7)
    template = random_text(drawn, WORDS, 60)
    texts = [mutated(drawn, template, WORDS, drawn.randint(1, 8)) for _ in range(120)]
    options = CleanOptions(near=NearChoice(threshold=0.6), exact_duplicates=True)
    found = [
        clean_texts(tmp_path, texts, options, workers, size) for workers, size in ((1, 1 << 20), (1, 1), (2, 5000))
    ]
    assert found[0][0] == found[1][0] == found[2][0] and 10 < len(found[0][0]) < 110
    assert found[0][1] == found[1][1] == found[2][1]


def test_memory_of_the_index_is_as_stated() -> None:
    drawn = np.random.default_rng(0)
    index = NearIndex(0.7, 128, 25)
    for start in range(0, 6000, 500):
        signatures = drawn.integers(0, 1 << 16, (500, 128), np.uint16)
        keys = drawn.integers(1, 1 << 63, (500, 25), np.uint64)
        assert index.duplicates_of(signatures, keys, np.arange(start, start + 500)) == [None] * 500
    assert 6000 * 760 <= index.nbytes <= 6000 * 1160 * 1.25
    assert index.duplicates_of(signatures[:2], keys[:2], np.array([6000, 6001])) == [(5500, 1.0), (5501, 1.0)]
