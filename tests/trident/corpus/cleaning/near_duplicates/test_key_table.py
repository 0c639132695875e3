"""The table of keys behaves like a dictionary and grows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trident.corpus.cleaning.near_duplicates.key_table import KeyTable


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), max_size=30, unique=True), max_size=8), st.integers(1, 2))
def test_the_table_is_a_dictionary(batches: list[list[int]], words: int) -> None:
    table, expected = KeyTable(words, with_values=True), {}
    for number, batch in enumerate(batches):
        # Few slots, zero and equal first words: every kind of collision.
        keys = np.array([[key % 5 * (1 << 40), key] if words == 2 else [key << 40] for key in batch], np.uint64)
        keys = keys.reshape(-1, words)
        there, values = table.find(keys)
        assert there.tolist() == [key in expected for key in batch]
        assert values.tolist() == [expected[key] for key in batch if key in expected]
        table.put(keys, np.arange(len(batch), dtype=np.uint32) + np.uint32(100 * number))
        expected.update({key: 100 * number + place for place, key in enumerate(batch)})
    assert len(table) == len(expected)


def test_the_table_grows() -> None:
    table = KeyTable(2, with_values=False)
    keys = np.random.default_rng(1).integers(0, 1 << 63, (50_000, 2), np.uint64)
    for start in range(0, 50_000, 7_000):
        table.put(keys[start : start + 7_000])
    assert len(table) == 50_000 and table.find(keys)[0].all()
    assert not table.find(keys ^ np.uint64(1))[0].any()
    assert 16 / 0.75 <= table.nbytes / 50_000 <= 16 / 0.375
