"""The closed-form models as scorers of queries."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megatron.errors import DataError
from tests.trident.evaluate.fakes import ByteTokenizer
from trident.evaluate import baselines
from trident.evaluate.baselines import Baseline, Baselines, Bigram, Uniform, Unigram
from trident.evaluate.scoring import Query


def test_the_uniform_model_knows_the_vocabulary_only() -> None:
    uniform = Baseline("uniform", Uniform(257))
    (score,) = uniform.score([Query((1, 2, 3, 4), 2)])
    assert score.logprob == pytest.approx(-2 * math.log(257))
    assert (score.tokens, score.is_greedy, score.predicted) == (2, False, (-1, -1))
    assert uniform.is_uniform and uniform.complete([1], 5) == []


def test_baselines_are_fitted_to_a_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "train.txt"
    text.write_text("abababac")
    baselines = Baselines(ByteTokenizer(), text)
    names = [baseline.name for baseline in baselines.fitted_to(None)]
    assert names == ["uniform", "unigram", "bigram"]
    text.unlink()
    _, unigram, bigram = baselines.fitted_to(None)
    (after_a,) = bigram.score([Query((*b"ab",), 1)])
    assert after_a.is_greedy and after_a.predicted == (ord("b"),)
    # Each document begins with end-of-document: 9 tokens, 4 of them a, and 257 added ones.
    (alone,) = unigram.score([Query((*b"ca",), 1)])
    assert alone.logprob == pytest.approx(math.log((4 + 1) / (9 + 257)))
    assert bytes(bigram.complete(list(b"xa"), 4)) == b"baba"


def test_without_a_training_text_only_the_uniform_model_remains() -> None:
    assert [baseline.name for baseline in Baselines(ByteTokenizer()).fitted_to(None)] == ["uniform"]


def test_the_training_text_of_a_task_comes_first(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("zzz")
    baselines = Baselines(ByteTokenizer(), tmp_path / "missing.txt")
    _, unigram, _ = baselines.fitted_to(tmp_path / "own.txt")
    assert unigram.score([Query((*b"az",), 1)])[0].is_greedy


def test_an_empty_training_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"empty\.txt holds no text to fit the baselines to"):
        Baselines(ByteTokenizer()).fitted_to(tmp_path / "empty.txt")


def test_a_huge_training_text_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "MOST_TRAINING_TOKENS", 5)
    (tmp_path / "lines.jsonl").write_text('{"text": "aaaa"}\n{"text": "bbbb"}\n')
    _, unigram, _ = Baselines(ByteTokenizer()).fitted_to(tmp_path / "lines.jsonl")
    seen, unseen = (unigram.score([Query((0, ord(letter)), 1)])[0].logprob for letter in "ab")
    assert seen > unseen == pytest.approx(math.log(1 / (5 + 257)))


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
