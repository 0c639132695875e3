"""Unigram and bigram models against probabilities computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron.evaluation.baselines.ngrams import Bigram, Unigram

# Tokens a=0, b=1, c=2, d=3; pairs: ab x3, ba x2, bc x1, ca x1; a 4 times, b 3 times, c once, d never.
STREAMS = [np.array([0, 1, 0, 1, 2]), np.array([2, 0, 1, 0])]


def fitted() -> tuple[Unigram, Bigram]:
    unigram = Unigram.fit(STREAMS, 4)
    return unigram, Bigram.fit(STREAMS, unigram)


def probability(model: Unigram | Bigram, before: int, token: int) -> float:
    logprobs, _ = model.score(np.array([before]), np.array([token]))
    return math.exp(logprobs[0])


def test_a_unigram_counts_with_one_added() -> None:
    unigram, _ = fitted()
    counts = (4, 3, 2, 0)
    for token, count in enumerate(counts):
        assert probability(unigram, 0, token) == pytest.approx((count + 1) / (9 + 4))


def test_a_bigram_discounts_what_it_saw_and_falls_back_on_the_unigram() -> None:
    unigram, bigram = fitted()
    # Pairs: ab 3, ba 2, bc 1, ca 1 -> n1 = 2, n2 = 1, d = 2 / (2 + 2 * 1)
    assert bigram.discount == 0.5
    after_b = {token: 0.5 * 2 / 3 * probability(unigram, 1, token) for token in range(4)}
    assert probability(bigram, 1, 0) == pytest.approx((2 - 0.5) / 3 + after_b[0])
    assert probability(bigram, 1, 2) == pytest.approx((1 - 0.5) / 3 + after_b[2])
    assert probability(bigram, 1, 3) == pytest.approx(after_b[3])


@pytest.mark.parametrize("before", range(4))
def test_probabilities_add_up_to_one(before: int) -> None:
    for model in fitted():
        assert math.fsum(probability(model, before, token) for token in range(4)) == pytest.approx(1.0)


def test_after_a_token_that_nothing_followed_a_bigram_is_the_unigram() -> None:
    unigram, bigram = fitted()
    for token in range(4):
        assert probability(bigram, 3, token) == pytest.approx(probability(unigram, 3, token))
    assert bigram.best[3] == unigram.best == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_most_probable_token_is_the_one_that_trying_all_finds(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    streams = [drawn.zipf(1.5, 30) % 12 for _ in range(4)]
    unigram = Unigram.fit(streams, 15)
    bigram = Bigram.fit(streams, unigram)
    for before in range(15):
        chances = np.array([probability(bigram, before, token) for token in range(15)])
        assert math.isclose(chances[bigram.best[before]], chances.max(), rel_tol=1e-12)


def test_pairs_do_not_reach_from_one_stream_into_the_next() -> None:
    _, bigram = fitted()
    assert 2 * 4 + 2 not in bigram.keys  # c ends the first stream and begins the second


def test_a_text_without_any_pair_gives_a_bigram_that_is_the_unigram() -> None:
    unigram = Unigram.fit([np.array([1])], 4)
    bigram = Bigram.fit([np.array([1])], unigram)
    assert probability(bigram, 1, 2) == pytest.approx(probability(unigram, 1, 2)) == pytest.approx(1 / 5)
    assert bigram.best.tolist() == [1, 1, 1, 1]
