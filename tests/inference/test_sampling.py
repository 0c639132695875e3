"""The choice of the next token: cuts, their order, and draws that depend on (seed, sample) only."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.inference.sampling import Sampling, choose, distribution, sample_generator

PROBABILITIES = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]])
SCORES = PROBABILITIES.log()


def test_without_top_k_and_top_p_it_is_the_softmax() -> None:
    torch.testing.assert_close(distribution(SCORES, Sampling()), PROBABILITIES)


def test_temperature_divides_the_logits() -> None:
    expected = (SCORES / 0.5).softmax(-1)
    torch.testing.assert_close(distribution(SCORES, Sampling(temperature=0.5)), expected)


@pytest.mark.parametrize(("top_k", "kept"), [(0, 5), (1, 1), (3, 3), (5, 5), (99, 5)])
def test_top_k_keeps_the_most_probable(top_k: int, kept: int) -> None:
    found = distribution(SCORES, Sampling(top_k=top_k))
    assert (found > 0).tolist() == [[rank < kept for rank in range(5)]]
    torch.testing.assert_close(found.sum(), torch.tensor(1.0))


def test_top_k_keeps_ties_with_the_last() -> None:
    found = distribution(torch.tensor([[1.0, 2.0, 2.0, 3.0]]), Sampling(top_k=2))
    assert (found > 0).tolist() == [[False, True, True, True]]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    # the token that crosses the threshold stays: 0.5 alone reaches 0.45; 0.5 + 0.2 crosses 0.6; and so on
    [(0.0, 5), (0.01, 1), (0.45, 1), (0.6, 2), (0.75, 3), (0.9, 4), (0.97, 5), (1.0, 5)],
)
def test_top_p_keeps_the_first_past_the_threshold(top_p: float, kept: int) -> None:
    found = distribution(SCORES, Sampling(top_p=top_p))
    assert int((found > 0).sum()) == kept
    torch.testing.assert_close(found[0, :kept], PROBABILITIES[0, :kept] / PROBABILITIES[0, :kept].sum())


def test_top_p_does_not_depend_on_the_order_of_the_vocabulary() -> None:
    order = torch.tensor([3, 0, 4, 2, 1])
    found = distribution(SCORES[:, order], Sampling(top_p=0.6))
    torch.testing.assert_close(found, distribution(SCORES, Sampling(top_p=0.6))[:, order])


def test_top_k_is_applied_before_top_p() -> None:
    # Of the best two, renormalised, the first has 0.5 / 0.7 = 0.714, which reaches 0.7 alone; of all, it would not.
    found = distribution(SCORES, Sampling(top_k=2, top_p=0.7))
    assert (found > 0).tolist() == [[True, False, False, False, False]]
    assert int((distribution(SCORES, Sampling(top_p=0.7)) > 0).sum()) >= 2


def test_every_row_is_filtered_independently() -> None:
    rows = torch.cat([SCORES, SCORES.flip(-1)])
    found = distribution(rows, Sampling(top_p=0.6))
    torch.testing.assert_close(found[1], found[0].flip(-1))


def test_draws_follow_the_distribution() -> None:
    sampling = Sampling(top_p=0.8, seed=7)
    count = 4000
    generators = [sample_generator(sampling.seed, sample) for sample in range(count)]
    drawn = torch.bincount(choose(SCORES.expand(count, -1), sampling, generators), minlength=5) / count
    expected = distribution(SCORES, sampling)[0]
    for observed, probability in zip(drawn.tolist(), expected.tolist(), strict=True):
        assert abs(observed - probability) <= 5 * math.sqrt(probability * (1 - probability) / count)


def test_greedy_ignores_everything_else() -> None:
    found = choose(SCORES, Sampling(greedy=True, temperature=9.0, top_k=3, top_p=0.1), [])
    assert found.tolist() == [0]


def test_draws_depend_on_seed_and_sample_only() -> None:
    rows = torch.zeros(8, 1000)
    sampling = Sampling(seed=3)
    together = choose(rows, sampling, [sample_generator(3, sample) for sample in range(8)])
    alone = torch.cat([choose(rows[:1], sampling, [sample_generator(3, sample)]) for sample in range(8)])
    assert together.tolist() == alone.tolist()
    other_seed = choose(rows, sampling, [sample_generator(4, sample) for sample in range(8)])
    assert together.tolist() != other_seed.tolist()
    assert len(set(together.tolist())) > 4


def test_masked_tokens_are_never_chosen() -> None:
    scores = torch.tensor([[0.0, float("-inf"), 0.0]]).expand(200, -1)
    drawn = choose(scores, Sampling(seed=1), [sample_generator(1, sample) for sample in range(200)])
    assert set(drawn.tolist()) == {0, 2}
