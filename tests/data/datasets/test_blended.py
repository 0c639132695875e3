"""Blends of datasets, and phases of blends."""

from collections.abc import Sequence

import numpy as np
import pytest

from megatron.data.datasets.blended import BlendedDataset, PhasedDataset
from megatron.data.datasets.sample import DocumentSpan
from megatron.errors import DataError
from tests.data.samples import GivenRows


def counting(prefix: str, first: int, samples: int) -> GivenRows:
    """Samples of one token each, which count up from `first`."""
    return GivenRows(np.arange(first, first + samples)[:, None], prefix=prefix)


def blend(firsts: Sequence[int] = (0, 0), places: Sequence[int] = (0, 1)) -> BlendedDataset:
    datasets = [counting("a", 0, 5), counting("b", 100, 5)]
    sources, samples = np.array([0, 1, 0, 1], np.uint8), np.array([0, 0, 1, 1])
    return BlendedDataset(datasets, sources, samples, firsts, places)


def test_samples_come_from_their_sources_in_order() -> None:
    dataset = blend()
    assert [int(dataset[number][0]) for number in range(len(dataset))] == [0, 100, 1, 101]
    assert [dataset.source_of(number) for number in range(4)] == [0, 1, 0, 1] and dataset.taken == (2, 2)
    assert dataset.locate(3, 7) == "b 1 column 7" and dataset.spans(2) == [DocumentSpan(1, 0, 1)]


def test_a_reused_source_continues_after_its_last_sample() -> None:
    dataset = blend(firsts=[3, 0], places=[4, 2])
    assert [int(dataset[number][0]) for number in range(4)] == [3, 100, 4, 101]
    assert [dataset.source_of(number) for number in range(2)] == [4, 2]


def test_more_samples_than_planned_are_refused() -> None:
    with pytest.raises(DataError, match="The blend needs 2 samples of a, which has 1 planned"):
        blend(firsts=[4, 0])


def test_phases_follow_each_other() -> None:
    phases = PhasedDataset([0, 4], [blend()], counting("c", 1000, 3))
    assert [int(phases[number][0]) for number in range(len(phases))] == [0, 100, 1, 101, 1000, 1001, 1002]
    assert (
        phases.source_of(3) == 1
        and phases.locate(5, 0) == "c 1 column 0"
        and phases.spans(4) == [DocumentSpan(0, 0, 1)]
    )
    with pytest.raises(IndexError, match="Sample 7 is out of range: 7 samples are planned"):
        phases.read(7)


def test_a_phase_whose_data_was_not_opened_is_named() -> None:
    phases = PhasedDataset([0, 4], [None], counting("c", 1000, 3))
    assert int(phases[4][0]) == 1000
    with pytest.raises(DataError, match="Sample 3 was consumed before the blend changed at sample 4"):
        phases.read(3)
