"""Cloze questions in both formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.errors import DataError
from tests.trident.evaluate.fakes import ByteTokenizer, FakeScorer, knows
from trident.evaluate.baselines import Baselines
from trident.evaluate.tasks.cloze import Cloze, read_cloze
from trident.evaluate.tasks.task import TaskOptions

BYTES = ByteTokenizer()
CBT = """1 A fox ran .
2 The fox saw a hen .
3 The XXXXX was hungry .\tfox\t\then|fox|dog

1 It rained .
2 They took an XXXXX with them .\tumbrella\t\tapple|umbrella
"""
JSONL = [
    {
        "context": ["A fox ran .", "The fox saw a hen ."],
        "query": "The XXXXX was hungry .",
        "candidates": ["hen", "fox", "dog"],
        "answer": "fox",
    },
    {
        "context": "It rained .",
        "question": "They took an XXXXX with them .",
        "choices": ["apple", "umbrella"],
        "answer": "umbrella",
    },
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cbt.txt").write_text(CBT)
    (tmp_path / "cbt.jsonl").write_text("\n".join(map(json.dumps, JSONL)))
    return tmp_path


def test_both_formats_hold_the_same_questions(folder: Path) -> None:
    text, lines = (list(read_cloze(folder / name)) for name in ("cbt.txt", "cbt.jsonl"))
    assert len(text) == 2
    for one, other in zip(text, lines, strict=True):
        assert {**vars(one), "source": ""} == {**vars(other), "source": ""}
    assert (text[0].before, text[0].after, text[0].answer) == ("The", " was hungry .", 1)
    assert text[1].source == f"{folder / 'cbt.txt'} line 6"


def test_candidates_are_compared_with_the_rest_of_the_sentence(folder: Path) -> None:
    scorer = FakeScorer(knows("fox saw a hen . The fox was hungry ."), max_length=40)
    Cloze(data="cbt.txt", folder=folder).run(scorer, BYTES)
    assert bytes(scorer.asked[0].tokens).endswith(b"The hen was hungry .")
    assert [bytes(query.targets) for query in scorer.asked[:3]] == [
        b" hen was hungry .", b" fox was hungry .", b" dog was hungry .",
    ]  # fmt: skip
    alone = FakeScorer(max_length=40)
    Cloze(data="cbt.txt", candidate_only=True, folder=folder).run(alone, BYTES)
    assert [bytes(query.targets) for query in alone.asked] == [b" hen", b" fox", b" dog", b" apple", b" umbrella"]


def test_figures_baselines_and_mistakes(folder: Path) -> None:
    (folder / "train.txt").write_text("dog dog dog. An apple. An apple.")
    full = "A fox ran . The fox saw a hen . The fox was hungry ."
    scorer = FakeScorer(knows(full, "It rained . They took an apple with them ."), max_length=100)
    options = TaskOptions(baselines=Baselines(BYTES))
    result = Cloze(data="cbt.txt", train="train.txt", folder=folder).run(scorer, BYTES, None, options)
    assert result.figures == {"acc": 0.5}
    assert [item["acc"] for item in result.per_item] == [1.0, 0.0]
    assert result.baselines["chance"]["acc"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert result.baselines["frequent"]["acc"] == pytest.approx((1.0 + 0.5) / 2)  # fox twice; then none occurs
    assert result.baselines["uniform"]["acc"] == pytest.approx((1 / 3 + 0.0) / 2)  # the candidates with fewest tokens
    assert set(result.baselines) == {"chance", "frequent", "uniform", "unigram", "bigram"}
    (mistake,) = result.wrong
    assert mistake.context == "It rained . They took an XXXXX with them ."
    assert (mistake.expected, mistake.predicted) == ("umbrella", "apple")


def test_the_limit_takes_the_first_questions(folder: Path) -> None:
    assert Cloze(data="cbt.jsonl", folder=folder).run(FakeScorer(max_length=99), BYTES, 1).count == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no number\n", "line 1 does not begin with the number of its sentence: 'no number'"),
        ("1 a XXXXX\tb\n", r"line 1 must hold a question, its answer and its candidates .* has 2 of them"),
        ("1 a blank\tb\t\tb|c\n", "line 1: the question must hold XXXXX once"),
        ("1 a XXXXX\tb\t\tb|b\n", r"line 1: expected at least two different candidates, got \('b', 'b'\)"),
        ("1 a XXXXX\td\t\tb|c\n", r"line 1: answer 'd' is not among the candidates \('b', 'c'\)"),
    ],
)
def test_a_bad_question_is_named(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "bad.txt").write_text(content)
    with pytest.raises(DataError, match=says):
        list(read_cloze(tmp_path / "bad.txt"))


def test_a_file_without_a_question_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("1 a story .\n")
    with pytest.raises(DataError, match=r"empty\.txt holds no item"):
        Cloze(data="empty.txt", folder=tmp_path).run(FakeScorer(), BYTES)


def test_a_line_without_candidates_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"query": "a XXXXX", "candidates": "b", "answer": "b"}')
    with pytest.raises(DataError, match='line 1 must have a list of texts under "candidates" or "choices"'):
        list(read_cloze(tmp_path / "bad.jsonl"))
