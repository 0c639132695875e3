"""The choice of the next token: draws that depend on (seed, sample) only, and the probabilities that are reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import NumericsError
from megatron.inference.sampling import Chooser, Chosen, Sampling, choose

PROBABILITIES = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]])
SCORES = PROBABILITIES.log()


def _tokens(scores: torch.Tensor, sampling: Sampling, samples: range) -> list[int]:
    return [found.token for found in choose(scores, [Chooser(sampling, [], sample) for sample in samples])]


BASE = (0.4, 0.2, 0.2, 0.1, 0.05, 0.05)
DRAWS = 4000
# What a correct sampler exceeds with one seed in a thousand, by degrees of freedom; the seed is fixed.
LIMITS = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}
HALF = math.log(2)
# Settings, prompt, text so far, and the distribution computed by hand, up to a common factor.
CASES: dict[str, tuple[dict[str, Any], list[int], list[int], tuple[float, ...]]] = {
    "plain": ({}, [], [], BASE),
    "low temperature": ({"temperature": 0.5}, [], [], (0.16, 0.04, 0.04, 0.01, 0.0025, 0.0025)),
    "high temperature": ({"temperature": 2.0}, [], [], tuple(math.sqrt(one) for one in BASE)),
    "top_k": ({"top_k": 4}, [], [], (0.4, 0.2, 0.2, 0.1, 0, 0)),
    "top_p": ({"top_p": 0.7}, [], [], (0.4, 0.2, 0.2, 0, 0, 0)),
    "min_p": ({"min_p": 0.2}, [], [], (0.4, 0.2, 0.2, 0.1, 0, 0)),
    # entropy 1.540 nats; information 0.916, 1.609, 1.609, 2.303, 2.996, 2.996
    "typical_p": ({"typical_p": 0.3}, [], [], (0, 0.2, 0.2, 0, 0, 0)),
    "repetition_penalty": ({"repetition_penalty": 2.0}, [0], [3], (0.16, 0.2, 0.2, 0.01, 0.05, 0.05)),
    "frequency_penalty": ({"frequency_penalty": HALF}, [0], [1, 1], (0.4, 0.05, 0.2, 0.1, 0.05, 0.05)),
    "presence_penalty": ({"presence_penalty": HALF}, [0], [1, 1, 3], (0.4, 0.1, 0.2, 0.05, 0.05, 0.05)),
    "logit_bias": ({"logit_bias": ((5, 2 * HALF), (0, -100.0))}, [], [], (0, 0.2, 0.2, 0.1, 0.05, 0.2)),
    "all": (
        {"temperature": 0.5, "top_k": 5, "top_p": 0.97, "min_p": 0.02, "frequency_penalty": HALF}, [], [0],
        (0.04, 0.04, 0.04, 0.01, 0.0025, 0),  # 0.4 is halved; of the last two, which tie, top_p needs the first
    ),
}  # fmt: skip


def _statistic(drawn: list[int], weights: Sequence[float]) -> tuple[float, int]:
    """Pearson's χ² of the draws, and its degrees of freedom; infinite if a token was drawn that never should be."""
    total, value, kinds = sum(weights), 0.0, 0
    for token, weight in enumerate(weights):
        count = drawn.count(token)
        if weight:
            expected = len(drawn) * weight / total
            value, kinds = value + (count - expected) ** 2 / expected, kinds + 1
        elif count:
            value = math.inf
    return value, kinds - 1


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name: str) -> None:
    changes, prompt, text, weights = CASES[name]
    sampling = Sampling(seed=7, **changes)
    choosers = [Chooser(sampling, prompt, sample) for sample in range(DRAWS)]
    for chooser in choosers:
        for token in text:
            chooser.append(token)
    drawn = [found.token for found in choose(torch.tensor([BASE]).log().expand(DRAWS, -1), choosers)]
    value, freedom = _statistic(drawn, weights)
    assert value < LIMITS[freedom]


def test_the_distribution_test_notices_other_distributions() -> None:
    drawn = _tokens(torch.tensor([BASE]).log().expand(DRAWS, -1), Sampling(seed=7), range(DRAWS))
    value, freedom = _statistic(drawn, (0.36, 0.22, 0.2, 0.1, 0.06, 0.06))
    assert value > LIMITS[freedom]
    assert _statistic(drawn, (0.4, 0.2, 0.2, 0.1, 0.1, 0))[0] == math.inf


def test_the_draws_of_one_sequence_follow_the_distribution_and_do_not_depend_on_each_other() -> None:
    chooser = Chooser(Sampling(seed=5), [])
    scores = torch.tensor([[0.5, 0.5]]).log()
    drawn = [choose(scores, [chooser])[0].token for _ in range(DRAWS)]
    assert _statistic(drawn, (1, 1))[0] < LIMITS[1]
    pairs = [2 * first + second for first, second in zip(drawn[::2], drawn[1::2], strict=True)]
    assert _statistic(pairs, (1, 1, 1, 1))[0] < LIMITS[3]


def test_the_same_draw_for_rows_that_differ_by_rounding() -> None:
    """What other layouts and batches do to scores changes the choice about as rarely as it changes probabilities."""
    scores = torch.randn(2000, 500, generator=torch.Generator().manual_seed(2)) * 2
    noise = 1e-6 * torch.randn(scores.shape, generator=torch.Generator().manual_seed(3))
    for sampling in (Sampling(seed=1), Sampling(seed=1, top_p=0.9), Sampling(seed=1, top_k=40)):
        one, other = (_tokens(rows, sampling, range(2000)) for rows in (scores, scores + noise))
        assert sum(a != b for a, b in zip(one, other, strict=True)) <= 2


@pytest.mark.parametrize("settings", [{"greedy": True}, {"temperature": 0.0}])
def test_greedy_ignores_temperature_and_cuts(settings: dict) -> None:
    assert _tokens(SCORES, Sampling(**{"temperature": 9.0, "top_k": 3, "top_p": 0.1, **settings}), range(1)) == [0]


def test_of_equal_scores_greedy_takes_the_first() -> None:
    scores = torch.zeros(3, 5000)
    scores[0, 4000:] = scores[1, [7, 4999]] = 1.0
    assert _tokens(scores, Sampling(greedy=True), range(3)) == [4000, 7, 0]
    assert _tokens(scores, Sampling(greedy=True, logit_bias=((1, -1.0),)), range(3)) == [4000, 7, 0]


def test_greedy_heeds_bias_and_penalties() -> None:
    assert _tokens(SCORES, Sampling(greedy=True, logit_bias=((3, 5.0),)), range(1)) == [3]
    chooser = Chooser(Sampling(greedy=True, presence_penalty=1.0), [0])
    assert [choose(SCORES, [chooser])[0].token for _ in range(4)] == [0, 1, 0, 0]


def test_draws_depend_on_seed_and_sample_only() -> None:
    rows = torch.zeros(8, 1000)
    together = _tokens(rows, Sampling(seed=3), range(8))
    alone = [_tokens(rows[:1], Sampling(seed=3), range(sample, sample + 1))[0] for sample in range(8)]
    assert together == alone
    assert together != _tokens(rows, Sampling(seed=4), range(8))
    assert len(set(together)) > 4


ANY_SETTINGS = st.builds(
    Sampling,
    greedy=st.booleans(),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 0, 1, 7, 50]),
    top_p=st.sampled_from([0.0, 0.3, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    typical_p=st.sampled_from([0.0, 0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    presence_penalty=st.sampled_from([0.0, -1.0]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (9, -100.0))]),
    seed=st.integers(0, 5),
)


@settings(max_examples=40)
@given(st.lists(ANY_SETTINGS, min_size=2, max_size=6), st.integers(0, 10**6))
def test_what_is_chosen_for_a_row_does_not_depend_on_the_others(rows: list[Sampling], seed: int) -> None:
    """Over three tokens, with settings of its own in each row, sequences that join later, and other samples beside."""
    draws = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, len(rows), 80, generator=draws) * 4
    together, alone = (
        [Chooser(one, [5, 6], sample, top_logprobs=sample % 3) for sample, one in enumerate(rows)] for _ in range(2)
    )
    for step, of_step in enumerate(scores):
        present = [row for row in range(len(rows)) if row % 2 == 0 or step > 0]
        found = choose(of_step[present], [together[row] for row in present])
        assert found == [choose(of_step[row : row + 1], [alone[row]])[0] for row in present]


def test_a_sequence_draws_anew_for_each_token() -> None:
    chooser = Chooser(Sampling(seed=3), [])
    assert len({choose(torch.zeros(1, 1000), [chooser])[0].token for _ in range(20)}) > 15


def test_masked_tokens_are_never_chosen() -> None:
    scores = torch.tensor([[0.0, float("-inf"), 0.0]]).expand(200, -1)
    assert set(_tokens(scores, Sampling(seed=1), range(200))) == {0, 2}


def test_log_probabilities_are_the_networks() -> None:
    sampling = Sampling(temperature=0.3, top_k=2, logit_bias=((4, 100.0),))
    chooser = Chooser(sampling, [], top_logprobs=3)
    (found,) = choose(SCORES + 7, [chooser])
    assert found.token == 4
    assert found.logprob == pytest.approx(math.log(0.05), abs=1e-5)
    assert [token for token, _ in found.top] == [0, 1, 2]
    assert [math.exp(logprob) for _, logprob in found.top] == pytest.approx([0.5, 0.2, 0.15], abs=1e-5)
    (asked,) = choose(SCORES, [Chooser(Sampling(greedy=True), [], top_logprobs=99)])
    assert len(asked.top) == 5
    (unasked,) = choose(SCORES, [Chooser(Sampling(greedy=True), [])])
    assert unasked == Chosen(0, pytest.approx(math.log(0.5), abs=1e-5))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([0.0, math.nan, 1.0], "sample 12 have NaN"),
        ([0.0, math.inf, 1.0], r"sample 12 have \+inf"),
        ([-math.inf] * 3, "sample 12 have no finite value"),
    ],
)
@pytest.mark.parametrize("greedy", [True, False])
def test_unusable_scores_are_refused(row: list[float], says: str, greedy: bool) -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0], row])
    with pytest.raises(NumericsError, match=says):
        choose(scores, [Chooser(Sampling(greedy=greedy), [], sample) for sample in (11, 12)])
