"""Random combinations train like one process; `--cases N` tries N of them, and `--fuzz-seed` others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from megatron.parallel.pieces import PieceKey
from tests.helpers.samples import DEFAULT_CASES
from tests.parity.combinations.campaign import figures, results_of
from tests.parity.combinations.drawing import draw
from tests.parity.combinations.training import Outcome, distance

FEW = 20


@pytest.mark.slow
def test_a_sample_trains_like_one_process(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    cases, seed = pytestconfig.getoption("--cases"), pytestconfig.getoption("--fuzz-seed")
    count = FEW if cases == DEFAULT_CASES else cases
    results = list(results_of([draw(number, tmp_path) for number in range(seed, seed + count)], tmp_path))
    assert not (problems := [each.problem for each in results if each.problem]), "\n".join(problems)
    assert len(results) == count and sum(bool(each.refusal) for each in results) <= count // 5, figures(results)


def outcome(*, shift: float = 0.0, norm: float = 1.0, first: int = 0) -> Outcome:
    """One of two ranks with half of a tensor each: the first, or the second."""
    key = PieceKey("a.weight", "weight", (2, 4), (0, 0), (2, 4), first, first + 4)
    values = np.arange(first, first + 4, dtype=np.float32)
    values[-1] += shift
    return Outcome("", ((2.0, norm),), ((key, values),))


def whole() -> Outcome:
    """What one process holds."""
    halves = outcome(), outcome(first=4)
    return dataclasses.replace(halves[0], pieces=halves[0].pieces + halves[1].pieces)


def test_a_difference_is_measured() -> None:
    apart = distance([outcome(), outcome(first=4, shift=0.5)], whole())
    assert apart.loss == apart.norm == 0 and apart.tensor == pytest.approx(0.5 / np.linalg.norm(np.arange(8.0)))
    assert distance([outcome(norm=1.5), outcome(first=4)], whole()).first_norm == 0.5
    assert np.isnan(distance([outcome(norm=np.nan), outcome(first=4)], whole()).norm)
    skipped = dataclasses.replace(whole(), curve=((2.0, np.nan),))
    assert distance([outcome(norm=np.nan), outcome(first=4, norm=np.nan)], skipped).norm == 0


def test_a_part_that_is_missing_or_there_twice_is_an_error() -> None:
    for parts in ([outcome()], [outcome(), outcome(), outcome(first=4)]):
        with pytest.raises(ValueError, match=r"'a.weight', 'weight'\).* missing or there twice"):
            distance(parts, whole())
