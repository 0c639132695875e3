"""Which tokens of a sample each rank has: all of them once, in equal shares of tokens and of work."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron.errors import DataError
from megatron.parallel.mesh import Axis, ParallelMesh, standard_axes
from megatron.parallel.sequence.split import SequenceSplit, balanced_parts, length_unit


def _split(ring: int, ulysses: int = 1, **options: Any) -> SequenceSplit:
    split = SequenceSplit.of(
        ParallelMesh.at(standard_axes(ring * ulysses, cp=ring, sp=ulysses), 0),
        **{"causal": True, "by_document": False, **options},
    )
    assert split is not None
    return split


def test_a_causal_ring_gives_each_rank_an_early_and_a_late_block() -> None:
    parts = _split(4).parts(32)
    assert parts.shape == (1, 4, 8)
    assert parts[0, :, ::4].tolist() == [[0, 28], [4, 24], [8, 20], [12, 16]]
    assert len(set((parts[0] + 1).sum(axis=1).tolist())) == 1  # the same work for all


def test_encoders_and_ulysses_have_consecutive_tokens() -> None:
    assert _split(2, causal=False).parts(8).tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert _split(1, 4).positions(8).tolist() == [[0, 1]]
    mixed = _split(2, 2)
    assert mixed.positions(16).tolist() == [[0, 1, 2, 3]]
    later = dataclasses.replace(mixed, ulysses=Axis("sp", 1, 2, (0, 1)))
    assert later.positions(16).tolist() == [[12, 13, 14, 15]]


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_documents_are_divided_into_equal_lengths_and_nearly_equal_work(ranks: int, window: int | None) -> None:
    generator = np.random.default_rng(ranks)
    length, rows = 8192, 4
    lengths = np.minimum(generator.lognormal(5.5, 1.3, (rows, 400)).astype(np.int64) + 1, length)
    segment_ids = np.stack([np.repeat(np.arange(400), row)[:length] for row in lengths])
    parts = _split(ranks, by_document=True, window=window).parts(length, segment_ids)
    for row, of_row in zip(segment_ids, parts, strict=True):
        assert sorted(of_row.ravel().tolist()) == list(range(length)) and (np.diff(of_row, axis=1) > 0).all()
        starts = np.searchsorted(row, row)
        work = np.minimum(np.arange(length) - starts + 1, window or length)[of_row].sum(axis=1)
        assert work.max() / work.mean() < 1.05


def test_a_wide_window_does_not_leave_early_and_late_blocks_unlike() -> None:
    """A rank whose late block costs no more than the others would have too little to do with its early one."""
    parts = _split(8, window=4096).parts(8192)[0]
    work = np.minimum(np.arange(8192) + 1, 4096)[parts].sum(axis=1)
    early_and_late = np.minimum(np.arange(8192) + 1, 4096)[_split(8).parts(8192)[0]].sum(axis=1)
    assert early_and_late.max() / early_and_late.mean() > 1.25 and work.max() / work.mean() < 1.05


def test_no_more_blocks_than_the_work_takes() -> None:
    assert (np.diff(balanced_parts(np.arange(64) + 1, 4), axis=1) > 1).sum(axis=1).tolist() == [1, 1, 1, 0]


def test_lengths_that_cannot_be_divided_are_refused() -> None:
    assert [length_unit(4, 1, causal=True), length_unit(4, 1, causal=False), length_unit(2, 4, causal=True)] == [
        8,
        4,
        8,
    ]
    with pytest.raises(DataError, match="12 tokens cannot be divided over 4 ranks.*multiples of 8"):
        _split(4).parts(12)


def test_a_mesh_without_sequence_axes_has_no_split() -> None:
    assert SequenceSplit.of(ParallelMesh.single(), causal=True, by_document=False) is None
