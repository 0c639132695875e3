"""Cutting documents into windows: every token appears where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.formats.parquet_windows import WindowFacts
from trident.corpus.featurize.window_cutting import Cutting, Documents, cut, tally, window_counts


@st.composite
def cuttings(draw: Any) -> Cutting:
    special = draw(st.integers(0, 2))
    length = draw(st.integers(special + 1, 12))
    stride = draw(st.integers(1, length - special))
    facts = WindowFacts(
        length, special, stride, -100, 9, 8, draw(st.sampled_from([0, 8])), mask_overlap=draw(st.booleans())
    )
    return Cutting(facts, draw(st.integers(1, length)), draw(st.booleans()), draw(st.integers(1, 60)))


def numbered(lengths: Sequence[int]) -> Documents:
    """Documents of ids that differ everywhere, 0 among them."""
    numbers = np.array(lengths, dtype=np.int64)
    tokens = np.arange(numbers.sum())
    return Documents(numbers, np.cumsum(numbers) - numbers, lambda start, stop: tokens[start:stop], "test")


@settings(max_examples=120, deadline=None)
@given(cuttings(), st.lists(st.integers(0, 40), max_size=6))
def test_every_token_of_every_document_appears(cutting: Cutting, lengths: list[int]) -> None:
    facts = cutting.facts
    found: list[dict[int, int]] = []
    learned: list[int] = []
    windows = repeated = padded = 0
    for rows, offsets in cut(cutting, numbered(lengths)):
        for ids, mask, labels, offset in zip(
            rows.input_ids.tolist(), rows.attention_mask.tolist(), rows.labels.tolist(), offsets.tolist(), strict=True
        ):
            used = int(sum(mask))
            assert mask == [1.0] * used + [0.0] * (facts.sequence_length - used)
            assert ids[used:] == [facts.pad_id] * (facts.sequence_length - used)
            assert labels[used:] == [-100] * (facts.sequence_length - used)
            assert ids[:1] == [9] or facts.special_tokens < 2
            if facts.special_tokens:
                assert ids[used - 1] == labels[used - 1] == 8
            body = slice(facts.before, used - (facts.special_tokens > 0))
            assert all(label in (token, -100) for token, label in zip(ids[body], labels[body], strict=True))
            assert facts.mask_overlap or labels[:used] == ids[:used]
            learned += [token for token, label in zip(ids[body], labels[body], strict=True) if label >= 0]
            if offset == 0:
                found.append({})
            for place, token in enumerate(ids[body], start=offset):
                assert found[-1].setdefault(place, token) == token
            windows += 1
            padded += facts.sequence_length - used
            repeated += len(ids[body])
    starts = np.cumsum(lengths) - lengths
    whole = {int(start): length for start, length in zip(starts, lengths, strict=True) if length}
    kept = 0
    for document in found:
        places = sorted(document)
        assert places == list(range(len(places)))
        tokens = [document[place] for place in places]
        length = whole.pop(tokens[0])
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        assert len(tokens) == length or cutting.drop_short
        kept += len(tokens)
    assert not whole or cutting.drop_short
    if facts.mask_overlap:
        assert len(learned) == len(set(learned)) == kept
    counted = tally(cutting, np.array(lengths, dtype=np.int64))
    assert (counted.documents, counted.tokens) == (sum(length > 0 for length in lengths), sum(lengths))
    assert (counted.windows, counted.kept, counted.padded) == (windows, kept, padded)
    assert (counted.repeated, counted.special) == (repeated - kept, windows * facts.special_tokens)
    assert counted.kept + counted.repeated + counted.special + counted.padded == windows * facts.sequence_length
    assert counted.windows == window_counts(cutting, np.array(lengths, dtype=np.int64)).sum()
