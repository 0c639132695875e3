"""The choice of the next token: draws that depend on (seed, sample) only, and the probabilities that are reported."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.errors import NumericsError
from megatron.inference.sampling import Chooser, Chosen, Sampling, choose
from megatron.inference.sampling.processing import warp

PROBABILITIES = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]])
SCORES = PROBABILITIES.log()


def _tokens(scores: torch.Tensor, sampling: Sampling, samples: range) -> list[int]:
    return [found.token for found in choose(scores, [Chooser(sampling, [], sample) for sample in samples])]


def test_draws_follow_the_distribution() -> None:
    sampling = Sampling(top_p=0.8, seed=7)
    count = 4000
    drawn = torch.bincount(torch.tensor(_tokens(SCORES.expand(count, -1), sampling, range(count))), minlength=5) / count
    expected = warp(SCORES, [sampling]).softmax(-1)[0]
    for observed, probability in zip(drawn.tolist(), expected.tolist(), strict=True):
        assert abs(observed - probability) <= 5 * math.sqrt(probability * (1 - probability) / count)


@pytest.mark.parametrize("settings", [{"greedy": True}, {"temperature": 0.0}])
def test_greedy_ignores_temperature_and_cuts(settings: dict) -> None:
    assert _tokens(SCORES, Sampling(**{"temperature": 9.0, "top_k": 3, "top_p": 0.1, **settings}), range(1)) == [0]


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
