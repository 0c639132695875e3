"""Metrics of choices: credits, ties, mistakes."""

from __future__ import annotations

import pytest

from trident.evaluate.scoring import Query, Score
from trident.evaluate.tasks.choices import ChoiceItem, PreparedChoices, constant, credit

ITEMS = (
    ChoiceItem("line 1", "first?", ("a", "bb"), 1),
    ChoiceItem("line 2", "second?", ("a", "b", "ccc"), 0),
)


def prepared(*, alone: bool = False) -> PreparedChoices:
    queries = [Query((1, 2), 1)] * 5
    ranks = {
        "acc": lambda item, number, score: score.logprob,
        "half": lambda item, number, score: score.logprob / len(item.choices[number]),
    }
    return PreparedChoices(ITEMS, queries * 2 if alone else queries, ranks, {})


def scores(*logprobs: float) -> list[Score]:
    return [Score(value, 1, False, (0,)) for value in logprobs]


@pytest.mark.parametrize(
    ("values", "answer", "worth"),
    [((1.0, 2.0), 1, 1.0), ((1.0, 2.0), 0, 0.0), ((2.0, 2.0, 1.0), 1, 0.5), ((0.0,) * 4, 3, 0.25)],
)
def test_a_tie_counts_in_parts(values: tuple[float, ...], answer: int, worth: float) -> None:
    assert credit(values, answer) == worth


def test_each_metric_ranks_in_its_own_way() -> None:
    measured = prepared().measure(scores(-2.0, -3.0, -1.0, -2.0, -6.0))
    assert measured.estimates["acc"].value == 0.5
    assert measured.estimates["half"].value == 1.0  # -3 / 2 > -2, and -1 > -2 = -6 / 3
    assert measured.per_item == (
        {"item": "line 1", "acc": 0.0, "half": 1.0},
        {"item": "line 2", "acc": 1.0, "half": 1.0},
    )
    (mistake,) = measured.mistakes
    assert (mistake.source, mistake.context, mistake.expected, mistake.predicted) == ("line 1", "first?", "bb", "a")


def test_what_the_question_adds_to_a_choice() -> None:
    both = prepared(alone=True)
    assert len(both.queries) == 10
    measured = both.measure(scores(-2.0, -3.0, -1.0, -2.0, -6.0, -1.0, -3.0, -4.0, -1.0, -9.0))
    # Item 1: -1 against 0; item 2: 3, -1 and 3, a tie of the right choice with the third.
    assert [item["acc_unconditional"] for item in measured.per_item] == [1.0, 0.5]


def test_a_baseline_without_a_model() -> None:
    assert constant(ITEMS, "acc", lambda item, number: 0.0).estimates["acc"].value == pytest.approx((1 / 2 + 1 / 3) / 2)
    longest = constant(ITEMS, "acc", lambda item, number: float(len(item.choices[number])))
    assert longest.estimates["acc"].value == 0.5
