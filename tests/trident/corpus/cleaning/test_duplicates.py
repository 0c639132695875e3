"""Duplicates: the first document stays, the others are rejected with the place of the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trident.corpus.cleaning.runs import write_jsonl
from trident.corpus.cleaning.cleaner import Cleaner
from trident.corpus.cleaning.documents.clean_options import CleanOptions, NearChoice
from trident.corpus.cleaning.duplicates import DuplicateFilter, ExactDuplicates
from trident.corpus.inputs.input_blocks import blocks


def test_a_text_is_a_duplicate_inside_a_block_and_across_blocks(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["a", "b", "a", "c", "b"])
    cleaner, exact = Cleaner(CleanOptions(exact_duplicates=True)), ExactDuplicates()
    found = [
        rejection is not None
        for block in blocks([str(path)], 30)
        for rejection in exact.rejections(cleaner.clean(block))
    ]
    assert found == [False, False, True, False, True]


def test_a_near_duplicate_names_its_original(tmp_path: Path) -> None:
    pytest.importorskip("datasketch")
    text = " ".join(f"word{number}" for number in range(200))
    first, second = (
        write_jsonl(tmp_path / name, documents)
        for name, documents in (
            ("a.jsonl", ["other words altogether and more of them", text]),
            ("b.jsonl", [text + " more"]),
        )
    )
    options = CleanOptions(near=NearChoice())
    cleaner, duplicates = Cleaner(options), DuplicateFilter(options)
    found = []
    for block in blocks([str(first), str(second)], 1 << 20):
        found += duplicates.rejections(cleaner.clean(block), block.source, 0)
    assert found[:2] == [None, None] and found[2] is not None
    assert found[2].reason == "near duplicate" and found[2].detail.endswith(f"like {first}:2")
