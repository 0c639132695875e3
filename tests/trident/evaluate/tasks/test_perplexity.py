"""Perplexity against values computed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.errors import ConfigError, DataError
from tests.tokenizers.framed import FRAMES, framed_tokenizer
from tests.trident.evaluate.fakes import EOD, ByteTokenizer, FakeScorer
from trident.evaluate.baselines import Baselines
from trident.evaluate.tasks.perplexity import Perplexity, overlapping_windows
from trident.evaluate.tasks.task import TaskOptions

BYTES = ByteTokenizer()


def by_length(tokens: tuple[int, ...]) -> float:
    """The longer the context, the surer."""
    return -1.0 / (len(tokens) - 1)


def test_every_token_counts_once_with_the_context_of_its_window(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefg hi")
    scorer = FakeScorer(by_length)
    task = Perplexity(data="text.txt", window=4, stride=2, folder=tmp_path)
    result = task.run(scorer, BYTES)
    # End-of-document and 10 letters: 10 targets. Window 1 has contexts of 1 to 4 tokens; each later one scores its last
    # two after 3 and 4 tokens.
    nats = [1 + 1 / 2 + 1 / 3 + 1 / 4, 2 * (1 / 3 + 1 / 4), 1 / 3 + 1 / 4]
    loss = sum(nats) / 10
    assert [query.tokens[query.first_target :] for query in scorer.asked] == [
        tuple(b"abcd"), tuple(b"ef"), tuple(b"g "), tuple(b"hi"),
    ]  # fmt: skip
    assert result.count == 3
    assert [item["tokens"] for item in result.per_item] == [4, 4, 2]
    assert [item["nats"] for item in result.per_item] == pytest.approx(nats)
    assert result.per_item[1]["item"] == "text.txt, token 4"
    assert result.figures["loss"] == pytest.approx(loss)
    assert result.figures["ppl"] == pytest.approx(math.exp(loss))
    assert result.figures["adjusted_ppl"] == pytest.approx(math.exp(sum(nats) / 2))  # two words
    assert result.figures["token_ratio"] == 5.0
    assert result.figures["bits_per_byte"] == pytest.approx(sum(nats) / 10 / math.log(2))
    assert result.figures["acc"] == pytest.approx(9 / 10)  # all but the first, whose probability is exp(-1)
    residuals = sum((own - loss * size) ** 2 for own, size in zip(nats, (4, 4, 2), strict=True))
    assert result.errors["loss"] == pytest.approx(math.sqrt(residuals * 3 / 2) / 10)
    assert result.errors["ppl"] == pytest.approx(result.errors["loss"] * result.figures["ppl"])
    assert result.notes == ("windows of 4 tokens, 2 apart",)


def test_with_nothing_before_a_document_its_first_token_word_and_byte_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two tree")
    result = Perplexity(data="text.txt", start="nothing", folder=tmp_path).run(FakeScorer(), BYTES)
    assert result.figures["loss"] == 1.0
    assert result.figures["token_ratio"] == (12 - 1) / (3 - 1)
    assert result.figures["adjusted_ppl"] == pytest.approx(math.exp(11 / 2))
    assert result.figures["bits_per_byte"] == pytest.approx(1 / math.log(2))


def test_the_words_and_bytes_of_a_tokenizer_with_many_bytes_a_token(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("é é")
    result = Perplexity(data="text.txt", folder=tmp_path).run(FakeScorer(), BYTES)
    assert result.figures["token_ratio"] == 5 / 2
    assert result.figures["bits_per_byte"] == pytest.approx(5 / 5 / math.log(2))


def test_wikitext_counts_the_words_as_published(tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text(" \n = A = \n \n x @-@ y . \n")
    task = Perplexity(data="wiki.txt", detokenizer="wikitext", start="nothing", folder=tmp_path)
    scorer = FakeScorer()
    result = task.run(scorer, BYTES)
    plain = "\n= A =\n\nx-y.\n"
    words = ["=", "A", "=", "\n", "\n", "x", "@-@", "y", "."]
    assert bytes(scorer.asked[0].tokens) == plain.encode()
    assert result.figures["token_ratio"] == (len(plain) - 1) / (len(words) - 1)


def test_documents_are_scored_apart(tmp_path: Path) -> None:
    lines = [{"text": "ab"}, {"text": ""}, {"text": "c"}]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    scorer = FakeScorer()
    result = Perplexity(data="texts.jsonl", folder=tmp_path).run(scorer, BYTES)
    assert [query.tokens for query in scorer.asked] == [(EOD, *b"ab"), (EOD, *b"c")]
    assert result.count == 2 and result.figures["token_ratio"] == 3 / 2


def test_the_ends_of_a_token_file_are_neither_scored_nor_counted(tmp_path: Path) -> None:
    with IndexedWriter(str(tmp_path / "tokens"), np.uint16) as writer:
        writer.add_document([np.array([*b"a b", EOD])])
        writer.add_document([np.array([*b"cd", EOD])])
    scorer = FakeScorer()
    result = Perplexity(data="tokens", folder=tmp_path).run(scorer, BYTES)
    assert [query.tokens for query in scorer.asked] == [(EOD, *b"a b"), (EOD, *b"cd")]
    assert result.figures["token_ratio"] == 5 / 3
    assert result.figures["bits_per_byte"] == pytest.approx(1 / math.log(2))


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("start", ["eod", "nothing"])
def test_a_document_has_the_same_figures_as_jsonl_and_as_a_token_file(frame: str, start: str, tmp_path: Path) -> None:
    tokenizer = framed_tokenizer(tmp_path, frame)
    texts = ["def choose(self, seq):\n    return seq[0]", "é 漢 and the rest of it", "</s>x<s>"]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    with IndexedWriter(str(tmp_path / "tokens"), np.uint16) as writer:
        for text in texts:
            writer.add_document([np.array([*tokenizer.encode(text), tokenizer.eod_id])])
    asked, figures = [], []
    for data in ("texts.jsonl", "tokens"):
        scorer = FakeScorer(by_length)
        figures.append(Perplexity(data=data, start=start, window=8, folder=tmp_path).run(scorer, tokenizer).figures)
        asked.append(scorer.asked)
    assert asked[0] == asked[1] and figures[0] == figures[1]


def test_what_the_tokenizer_puts_around_a_text_is_not_scored(tmp_path: Path) -> None:
    tokenizer = framed_tokenizer(tmp_path, "<s> $A </s>")
    (tmp_path / "text.txt").write_text("a cat")
    scorer = FakeScorer()
    result = Perplexity(data="text.txt", folder=tmp_path).run(scorer, tokenizer)
    (query,) = scorer.asked
    assert query.tokens[0] == tokenizer.ids_before[0] and query.first_target == 1
    assert tokenizer.decode(query.targets) == "a cat"
    assert result.figures["bits_per_byte"] == pytest.approx(len(query.targets) / 5 / math.log(2))


def test_the_limit_takes_stretches_from_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ab cd ef gh ij kl")
    task = Perplexity(data="text.txt", window=4, stride=2, folder=tmp_path)
    whole, part = task.run(FakeScorer(by_length), BYTES), task.run(FakeScorer(by_length), BYTES, 2)
    assert part.count == 2 and part.per_item == whole.per_item[:2]
    assert part.figures["token_ratio"] == whole.figures["token_ratio"]


def test_the_first_wrong_token_of_a_stretch_is_shown(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh")
    scorer = FakeScorer(lambda tokens: -2.0 if tokens[-1] in b"cg" else -0.1)
    task = Perplexity(data="text.txt", window=4, stride=4, folder=tmp_path)
    first, second = task.run(scorer, BYTES).wrong
    assert (first.context, first.expected, first.predicted) == ("ab", "c", "?")
    assert (second.context, second.expected) == ("def", "g")


def test_the_uniform_baseline_has_the_vocabulary_as_perplexity(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcabcabd")
    (tmp_path / "train.txt").write_text("abcabcabcabd" * 3)
    task = Perplexity(data="text.txt", train="train.txt", folder=tmp_path)
    result = task.run(FakeScorer(lambda tokens: -0.01), BYTES, None, TaskOptions(baselines=Baselines(BYTES)))
    figures = [result.baselines[name]["ppl"] for name in ("uniform", "unigram", "bigram")] + [result.figures["ppl"]]
    assert figures[0] == pytest.approx(257)
    assert figures == sorted(figures, reverse=True) and len(set(figures)) == 4
    assert result.baselines["uniform"]["acc"] == pytest.approx(1 / 257)
    assert result.baselines["bigram"]["acc"] == pytest.approx(8 / 9)  # all but d: after b, c is more frequent


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="--window 33 of the task perplexity:text exceeds the 32 positions"):
        Perplexity(data="text.txt", window=33, folder=tmp_path).run(FakeScorer(), BYTES)
    with pytest.raises(DataError, match=r"empty\.txt holds no item"):
        Perplexity(data="empty.txt", folder=tmp_path).run(FakeScorer(), BYTES)
    with pytest.raises(ConfigError, match="--detokenizer klingon is unknown. Use one of: none, wikitext, ptb"):
        Perplexity(data="text.txt", detokenizer="klingon")


def test_the_windows_of_a_short_text() -> None:
    windows = list(overlapping_windows(range(10), window=4, stride=2))
    assert [(query.tokens, query.first_target) for query in windows] == [
        ((0, 1, 2, 3, 4), 1),
        ((2, 3, 4, 5, 6), 3),
        ((4, 5, 6, 7, 8), 3),
        ((6, 7, 8, 9), 3),
    ]


@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 16, 17, 33, 100])
@pytest.mark.parametrize("window", [1, 2, 7, 8])
@pytest.mark.parametrize("stride", [1, 3, 8, 50])
def test_every_token_is_scored_once(length: int, window: int, stride: int) -> None:
    windows = list(overlapping_windows(range(length), window, stride))
    assert [token for query in windows for token in query.targets] == list(range(1, length))
    stride = min(stride, window)
    for number, query in enumerate(windows):
        assert len(query.tokens) <= window + 1
        assert query.tokens[0] == number * stride  # upstream's windows begin there
        assert query.first_target == (1 if number == 0 else window + 1 - stride)


@pytest.mark.parametrize("length", [0, 1])
def test_a_text_without_a_second_token_has_no_window(length: int) -> None:
    assert list(overlapping_windows(range(length), 4, 2)) == []
