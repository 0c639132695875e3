"""Batches of queries: what they hold, how they are filled, and that results find their way back."""

from __future__ import annotations

import numpy as np
import pytest

from trident.evaluate.batches import Answers, plan_batches, plan_rounds
from trident.evaluate.scoring import Query, Score


def queries_of(lengths: list[int]) -> list[Query]:
    """Queries of these lengths with one target each."""
    return [Query(tuple(range(length)), length - 1) for length in lengths]


def test_a_batch_holds_inputs_and_the_rows_that_predict_targets() -> None:
    answers = Answers([Query((9, 9), 1), Query((1, 2, 3, 4), 2), Query((5, 6, 7), 1)])
    batch = answers.batch([1, 2])
    assert batch.inputs.tolist() == [[1, 2, 3], [5, 6, 0]]
    assert batch.prefix.tolist() == [[True, True, False], [True, False, False]]
    assert batch.rows.tolist() == [1, 2, 3, 4]
    assert batch.labels.tolist() == [3, 4, 6, 7]
    assert batch.indices.tolist() == [1, 2, 3, 4]


def test_results_come_back_in_the_order_of_the_queries() -> None:
    answers = Answers([Query((9, 8), 1), Query((1, 2, 3, 4), 2)])
    for numbers, logprobs, predicted in (([1], [-1.0, -2.0], [3, 5]), ([0], [-0.5], [8])):
        batch = answers.batch(numbers)
        answers.logprobs[batch.indices], answers.predicted[batch.indices] = logprobs, predicted
    assert answers.scores() == [Score(-0.5, 1, True, (8,)), Score(-3.0, 2, False, (3, 5))]


def test_no_queries_have_no_scores() -> None:
    assert plan_batches([], 10) == []
    assert Answers([]).scores() == []


def test_batches_hold_similar_lengths_and_keep_to_the_budget() -> None:
    lengths = np.random.default_rng(1).integers(2, 101, size=400).tolist()
    batches = plan_batches(queries_of(lengths), 600)
    assert sorted(number for batch in batches for number in batch) == list(range(400))
    inputs = sum(length - 1 for length in lengths)
    padded = sum(len(batch) * (max(lengths[number] for number in batch) - 1) for batch in batches)
    assert all(len(batch) * (max(lengths[number] for number in batch) - 1) <= 600 for batch in batches)
    assert padded / inputs < 1.05, "less than 5 % of what is computed is padding"
    assert len(batches) < 1.1 * inputs / 600


def test_the_longest_come_first_and_a_query_beyond_the_budget_has_its_own_batch() -> None:
    assert plan_batches(queries_of([3, 11, 5, 4]), 6) == [[1], [2], [3, 0]]


def test_long_queries_are_not_padded_where_that_changes_the_network() -> None:
    queries = queries_of([9, 8, 9, 6, 5, 4])
    assert plan_batches(queries, 100) == [[0, 2, 1, 3, 4, 5]]
    assert plan_batches(queries, 100, padded_up_to=5) == [[0, 2], [1], [3, 4, 5]]


@pytest.mark.parametrize("budget", [1, 7, 1000])
def test_every_query_is_in_one_batch(budget: int) -> None:
    batches = plan_batches(queries_of([4, 2, 9, 4]), budget)
    assert sorted(number for batch in batches for number in batch) == [0, 1, 2, 3]


def test_the_batches_of_a_round_share_a_shape() -> None:
    lengths = np.random.default_rng(2).integers(2, 60, size=300).tolist()
    rounds = plan_rounds(queries_of(lengths), 200, 6)
    assert sorted(number for batches in rounds for batch in batches for number in batch) == list(range(300))
    for batches in rounds:
        longest = max(lengths[number] for batch in batches for number in batch) - 1
        assert len(batches) <= 6 and len(batches[0]) * longest <= 200
        assert {len(batch) for batch in batches[:-1]} <= {len(batches[0])} and 1 <= len(batches[-1]) <= len(batches[0])


def test_a_round_is_divided_evenly() -> None:
    assert plan_rounds(queries_of([5] * 7), 100, 2) == [[[0, 1, 2, 3], [4, 5, 6]]]
    assert plan_rounds(queries_of([5] * 7), 100, 3) == [[[0, 1, 2], [3, 4, 5], [6]]]
    assert plan_rounds(queries_of([9, 5, 9, 5]), 100, 2, padded_up_to=4) == [[[0], [2]], [[1], [3]]]
