"""The choice of the next token: draws that depend on (seed, sample) only, and the probabilities that are reported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from megatron.errors import ConfigError, NumericsError
from megatron.inference.sampling import Chooser, Sampling, TokenChoice, choose
from megatron.inference.sampling.choosing import adjust, cut, warp

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


def test_the_draws_of_one_sequence_follow_the_distribution_and_do_not_depend_on_each_other() -> None:
    chooser = Chooser(Sampling(seed=5), [])
    scores = torch.tensor([[0.5, 0.5]]).log()
    drawn = [choose(scores, [chooser])[0].token for _ in range(DRAWS)]
    assert _statistic(drawn, (1, 1))[0] < LIMITS[1]
    pairs = [2 * first + second for first, second in zip(drawn[::2], drawn[1::2], strict=True)]
    assert _statistic(pairs, (1, 1, 1, 1))[0] < LIMITS[3]


def test_the_same_draw_for_rows_that_differ_by_rounding() -> None:
    """Rounding differences of other layouts and batches change choices about as rarely as probabilities."""
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
    """Over three tokens: each row has settings of its own, sequences join later, and the batch has other samples."""
    draws = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, len(rows), 80, generator=draws) * 4
    together, alone = (
        [Chooser(one, [5, 6], sample, top_logprobs=sample % 3) for sample, one in enumerate(rows)] for _ in range(2)
    )
    for step, of_step in enumerate(scores):
        present = [row for row in range(len(rows)) if row % 2 == 0 or step > 0]
        found = choose(of_step[present], [together[row] for row in present])
        assert found == [choose(of_step[row : row + 1], [alone[row]])[0] for row in present]


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
    assert unasked == TokenChoice(0, pytest.approx(math.log(0.5), abs=1e-5))


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


def _distribution(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    return warp(scores, [sampling] * len(scores)).softmax(-1)


def _adjusted(scores: torch.Tensor, sampling: Sampling, prompt: list[int], text: list[int]) -> torch.Tensor:
    chooser = Chooser(sampling, prompt)
    for token in text:
        chooser.append(token)
    return adjust(scores, [chooser])


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e38])
def test_no_temperature_overflows(temperature: float) -> None:
    found = _distribution(torch.tensor([[900.0, 899.0, -1e30, float("-inf")]]), Sampling(temperature=temperature))
    expected = [[1.0, 0.0, 0.0, 0.0]] if temperature < 1 else [[1 / 3, 1 / 3, 1 / 3, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_the_bias_comes_first_and_the_repetition_penalty_before_the_others() -> None:
    sampling = Sampling(logit_bias=((0, 4.0),), repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.25)
    assert _adjusted(torch.tensor([[2.0, 1.0]]), sampling, [], [0, 0]).tolist() == [[(2 + 4) / 2 - 2 * 1.0 - 0.25, 1.0]]


def test_scores_that_nothing_changes_are_not_copied() -> None:
    assert _adjusted(SCORES, Sampling(top_k=3, temperature=0.5), [1], [2]) is SCORES
    before = SCORES.clone()
    _adjusted(SCORES, Sampling(presence_penalty=1.0), [1], [2])
    assert torch.equal(SCORES, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_may_be_a_whole_number(dtype: torch.dtype) -> None:
    history = Chooser(Sampling(logit_bias=((1, 2), (1, 1))), (0,))
    assert adjust(torch.zeros(1, 3, dtype=dtype), [history]).tolist() == [[0.0, 3.0, 0.0]]


def test_a_bias_for_a_token_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"logit_bias has token 5, and the vocabulary ends at 4"):
        _adjusted(SCORES, Sampling(logit_bias=((5, 1.0),)), [], [])


PROMPT, TEXT = [5, 17, 5, 99], [3, 17, 17]
REFERENCES: dict[str, tuple[Sampling, list[LogitsProcessor]]] = {
    "temperature": (Sampling(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
    "top_k": (Sampling(top_k=20), [TopKLogitsWarper(20)]),
    "top_p": (Sampling(top_p=0.8), [TopPLogitsWarper(0.8)]),
    "min_p": (Sampling(min_p=0.05), [MinPLogitsWarper(0.05)]),
    "typical": (Sampling(typical_p=0.6), [TypicalLogitsWarper(0.6)]),
    "repetition": (Sampling(repetition_penalty=1.3), [RepetitionPenaltyLogitsProcessor(1.3)]),
    "bias": (Sampling(logit_bias=((3, 4.0), (8, -100.0))), [SequenceBiasLogitsProcessor([[[3], 4.0], [[8], -100.0]])]),
    "all": (
        Sampling(
            temperature=1.5, top_k=150, top_p=0.95, min_p=0.01, typical_p=0.9, repetition_penalty=1.2,
            logit_bias=((3, 4.0), (17, -2.0)),
        ),
        [
            SequenceBiasLogitsProcessor([[[3], 4.0], [[17], -2.0]]),
            RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(1.5), TopKLogitsWarper(150),
            TopPLogitsWarper(0.95), MinPLogitsWarper(0.01), TypicalLogitsWarper(0.9),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCES)
def test_equal_to_transformers(name: str) -> None:
    sampling, processors = REFERENCES[name]
    scores = torch.randn(40, 400, generator=torch.Generator().manual_seed(7)) * 3
    scores[::2, 10:13] = scores[::2, :1]  # ties
    scores[1::2, 350:] = -math.inf  # padding of the vocabulary
    choosers = [Chooser(sampling, PROMPT) for _ in scores]
    for chooser in choosers:
        for token in TEXT:
            chooser.append(token)
    found = warp(adjust(scores, choosers), [sampling] * len(scores))
    expected = scores.clone()
    for processor in processors:
        expected = processor(torch.tensor([PROMPT + TEXT] * len(scores)), expected)
    assert torch.equal(found.isneginf(), expected.isneginf())
    torch.testing.assert_close(found.softmax(-1), expected.softmax(-1))


SETTINGS = st.builds(
    Sampling,
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.7, 1.0]),
    typical_p=st.sampled_from([0.0, 0.0, 0.2, 0.9]),
)


@example([Sampling(), Sampling(top_p=0.9, typical_p=0.2)], 0, 2.0)  # typicality removes the last candidate
@given(st.lists(SETTINGS, min_size=1, max_size=4), st.integers(0, 10**6), st.sampled_from([0.5, 2.0, 8.0]))
def test_candidates_are_enough_or_everything_is_sorted(settings: list[Sampling], seed: int, spread: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    scores = (torch.randn(len(settings), 60, generator=draws) * spread).round()  # many are equal
    scores[:, 50:] = float("-inf")
    scores -= scores.amax(dim=-1, keepdim=True)
    expected = cut(scores, settings, candidates=60)
    assert torch.equal(cut(scores, settings, candidates=5), expected)
    for row, one in enumerate(settings):
        assert torch.equal(cut(scores[row : row + 1], [one], candidates=5)[0], expected[row])
