"""LAMBADA: which tokens are predicted, and the figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron.errors import DataError
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.vocabulary import write_vocabulary
from tests.trident.evaluate.fakes import EOD, ByteTokenizer, FakeScorer, knows
from trident.evaluate.baselines import Baselines
from trident.evaluate.tasks.lambada import Lambada
from trident.evaluate.tasks.task import TaskOptions

BYTES = ByteTokenizer()


def passages(folder: Path, *texts: str) -> str:
    (folder / "passages.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return "passages.jsonl"


def test_strict_predicts_the_last_word_and_default_the_last_token(tmp_path: Path) -> None:
    data = passages(tmp_path, "We met the cat")
    strict, default = FakeScorer(), FakeScorer()
    Lambada(data=data, folder=tmp_path).run(strict, BYTES)
    Lambada(data=data, strict=False, folder=tmp_path).run(default, BYTES)
    assert bytes(strict.asked[0].targets) == b" cat" and bytes(default.asked[0].targets) == b"t"
    assert bytes(default.asked[0].tokens) == b"We met the cat"


def test_the_tokens_are_upstreams(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write_vocabulary(tmp_path))
    text = "If the sequence is in the population, return the sequence "
    data, scorer = passages(tmp_path, text), FakeScorer()
    Lambada(data=data, folder=tmp_path).run(scorer, tokenizer)
    last = text.split()[-1]
    before, after = tokenizer.encode(text[: text.rfind(last)].strip()), tokenizer.encode(" " + last)
    assert (list(scorer.asked[0].tokens), scorer.asked[0].first_target) == (before + after, len(before))


def test_a_passage_of_one_word_follows_the_end_of_a_document(tmp_path: Path) -> None:
    scorer = FakeScorer()
    Lambada(data=passages(tmp_path, "cat"), folder=tmp_path).run(scorer, BYTES)
    assert scorer.asked[0].tokens == (EOD, *b"cat")


def test_a_long_passage_keeps_its_end(tmp_path: Path) -> None:
    scorer = FakeScorer(max_length=10)
    Lambada(data=passages(tmp_path, "x" * 50 + " the cat"), folder=tmp_path).run(scorer, BYTES)
    assert bytes(scorer.asked[0].tokens) == b"xx the cat"


def test_figures_and_mistakes(tmp_path: Path) -> None:
    data = passages(tmp_path, "I am here", "I am there", "You are here")
    (tmp_path / "train.txt").write_text("here there here")
    scorer = FakeScorer(knows("I am here", "You are here"))
    options = TaskOptions(baselines=Baselines(BYTES, tmp_path / "train.txt"))
    result = Lambada(data=data, folder=tmp_path).run(scorer, BYTES, None, options)
    hit = 5 * 0.1  # " here"
    miss = 0.1 + 5 * 3.0  # " there": the blank is right, t and what follows it is not known
    mean = (2 * hit + miss) / 3
    assert result.figures["acc"] == pytest.approx(2 / 3)
    assert result.errors["acc"] == pytest.approx(math.sqrt(2 / 3 * 1 / 3 / 2))
    assert result.figures["ppl"] == pytest.approx(math.exp(mean))
    assert [item["acc"] for item in result.per_item] == [1.0, 0.0, 1.0]
    assert [item["logprob"] for item in result.per_item] == pytest.approx([-hit, -miss, -hit])
    (mistake,) = result.wrong
    assert (mistake.context, mistake.expected, mistake.predicted) == ("I am", " there", " ?????")
    assert mistake.source == "passages.jsonl line 2"
    uniform = result.baselines["uniform"]
    assert uniform["acc"] == pytest.approx((2 * 257**-5 + 257**-6) / 3)
    assert uniform["ppl"] > result.baselines["unigram"]["ppl"] > result.baselines["bigram"]["ppl"]


def test_the_limit_takes_the_first_passages(tmp_path: Path) -> None:
    data = passages(tmp_path, "a b", "c d", "e f")
    assert Lambada(data=data, folder=tmp_path).run(FakeScorer(), BYTES, 2).count == 2


def test_an_empty_passage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 2 holds no word"):
        Lambada(data=passages(tmp_path, "a b", "  "), folder=tmp_path).run(FakeScorer(), BYTES)
