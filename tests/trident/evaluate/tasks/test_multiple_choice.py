"""Multiple choice: queries, the three metrics, and the baselines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError
from tests.trident.evaluate.fakes import EOD, ByteTokenizer, FakeScorer
from trident.evaluate.baselines import Baselines
from trident.evaluate.tasks.multiple_choice import MultipleChoice
from trident.evaluate.tasks.task import TaskOptions

BYTES = ByteTokenizer()
ROWS: list[dict[str, Any]] = [
    {"question": "Sky?", "choices": ["blue", "red"], "answer": 0},
    {"query": "Grass?", "choices": ["up", "green", "no"], "answer": "b"},
]


def write(folder: Path, *rows: dict[str, Any], name: str = "items.jsonl") -> str:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return name


def flat(tokens: tuple[int, ...]) -> float:
    return -1.0


def test_queries(tmp_path: Path) -> None:
    scorer = FakeScorer(max_length=99)
    write(tmp_path, {"question": "Fire?", "choices": ["hot", "cold"], "answer": "A"}, name="shown.jsonl")
    task = MultipleChoice(
        data=write(tmp_path, *ROWS), template="Q: {question}\nA:", few_shot=1, examples="shown.jsonl", folder=tmp_path
    )
    result = task.run(scorer, BYTES)
    assert bytes(scorer.asked[1].tokens) == b"Q: Fire?\nA: hot\n\nQ: Sky?\nA: red"
    assert bytes(scorer.asked[1].targets) == b" red"
    assert len(scorer.asked) == 5 and result.notes == ("1 questions with answers in front",)


def test_acc_compares_choices_and_acc_norm_their_bytes(tmp_path: Path) -> None:
    # Every byte costs the same, the blank before a choice too: the shortest choice is the most probable one, and the
    # longest loses least per byte.
    result = MultipleChoice(data=write(tmp_path, *ROWS), folder=tmp_path).run(FakeScorer(flat), BYTES)
    assert [(item["acc"], item["acc_norm"]) for item in result.per_item] == [(0.0, 1.0), (0.0, 1.0)]
    assert result.figures == {"acc": 0.0, "acc_norm": 1.0}
    assert [(mistake.expected, mistake.predicted) for mistake in result.wrong] == [("blue", "red"), ("green", "up")]


def test_acc_norm_counts_bytes_not_letters(tmp_path: Path) -> None:
    row = {"question": "?", "choices": ["ééé", "abcde"], "answer": 0}
    result = MultipleChoice(data=write(tmp_path, row), folder=tmp_path).run(FakeScorer(flat), BYTES)
    assert result.figures["acc_norm"] == 1.0  # -7 / 6 bytes against -6 / 5; by letters it would be -7 / 3


def test_what_a_question_adds_to_its_choices(tmp_path: Path) -> None:
    def logprob(tokens: tuple[int, ...]) -> float:
        text = BYTES.decode(tokens)
        return -0.5 if text.startswith("Sky? blue"[: len(text)]) else -1.0 if tokens[0] == EOD else -2.0

    task = MultipleChoice(data=write(tmp_path, ROWS[0]), unconditional=True, folder=tmp_path)
    scorer = FakeScorer(logprob)
    result = task.run(scorer, BYTES)
    assert [query.tokens for query in scorer.asked[2:]] == [(EOD, *b" blue"), (EOD, *b" red")]
    # blue: -2.5 with the question, -5 alone; red: -6.5 and -4.
    assert result.figures == {"acc": 1.0, "acc_norm": 1.0, "acc_unconditional": 1.0}


def test_baselines(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("red red red up up up")
    options = TaskOptions(baselines=Baselines(BYTES, tmp_path / "train.txt"))
    data = write(tmp_path, *ROWS, {"question": "Sea?", "choices": ["dry", "wet"], "answer": 1})
    result = MultipleChoice(data=data, folder=tmp_path).run(FakeScorer(flat), BYTES, None, options)
    chances = {name: figures["acc"] for name, figures in result.baselines.items()}
    assert chances["chance"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3)
    assert chances["longest"] == pytest.approx((1 + 1 + 1 / 2) / 3)
    assert chances["position"] == pytest.approx(2 / 3)  # the second choice is right twice
    assert chances["unigram"] == 0.0  # red, up and dry have the letters of the training text
    assert set(chances) == {"chance", "longest", "position", "uniform", "unigram", "bigram"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "?", "choices": ["a"], "answer": 0}, r"line 1 must have a list of two or more texts .* \['a'\]"),
        ({"question": "?", "choices": ["a", 3], "answer": 0}, '"choices" must be a text, not 3'),
        ({"question": "?", "choices": ["a", " "], "answer": 0}, r"line 1 has an empty choice: \('a', ' '\)"),
        ({"question": "?", "choices": ["a", "b"], "answer": 2}, r'"answer" 2 is none of the 2 choices.* from A to B'),
        ({"question": "?", "choices": ["a", "b"], "answer": "C"}, r"\"answer\" 'C' is none of the 2 choices"),
        ({"question": "?", "choices": ["a", "b"], "answer": True}, '"answer" True is none of the 2 choices'),
        ({"question": "?", "choices": ["a", "b"]}, '"answer" None is none of the 2 choices'),
        ({"choices": ["a", "b"], "answer": 0}, r'line 1 has no "question" or "query"'),
    ],
)
def test_a_bad_question_is_named(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        MultipleChoice(data=write(tmp_path, row), folder=tmp_path).run(FakeScorer(), BYTES)


def test_keys_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--template Q: must hold \{question\}"):
        MultipleChoice(data="x", template="Q:")
    with pytest.raises(ConfigError, match="--few-shot 2 requires --examples"):
        MultipleChoice(data="x", few_shot=2)
    data = write(tmp_path, *ROWS)
    with pytest.raises(DataError, match="holds 2 questions, but few_shot is 3"):
        MultipleChoice(data=data, few_shot=3, examples=data, folder=tmp_path).run(FakeScorer(), BYTES)
