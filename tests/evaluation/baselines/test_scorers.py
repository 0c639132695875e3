"""The closed-form models as scorers of queries."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron.errors import DataError
from megatron.evaluation.baselines import scorers
from megatron.evaluation.baselines.scorers import Baseline, Baselines, Uniform
from megatron.evaluation.scoring import Query
from tests.evaluation.fakes import ByteTokenizer


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
    monkeypatch.setattr(scorers, "MOST_TRAINING_TOKENS", 5)
    (tmp_path / "lines.jsonl").write_text('{"text": "aaaa"}\n{"text": "bbbb"}\n')
    _, unigram, _ = Baselines(ByteTokenizer()).fitted_to(tmp_path / "lines.jsonl")
    seen, unseen = (unigram.score([Query((0, ord(letter)), 1)])[0].logprob for letter in "ab")
    assert seen > unseen == pytest.approx(math.log(1 / (5 + 257)))
