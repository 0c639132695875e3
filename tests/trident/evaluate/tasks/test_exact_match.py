"""Exact match: how answers are compared, and what the baselines write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError
from tests.trident.evaluate.fakes import ByteTokenizer, FakeScorer
from trident.evaluate.baselines import Baselines
from trident.evaluate.tasks.exact_match import ExactMatch, before_stops, normalized
from trident.evaluate.tasks.task import TaskOptions

BYTES = ByteTokenizer()
ROWS = [
    {"prompt": "Two and two?", "answer": "four"},
    {"question": "Sky?", "answers": ["Blue", "azure"]},
    {"prompt": "Sea?", "answer": "four"},
]


def write(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return "items.jsonl"


def answering(*texts: str):
    asked: list[tuple[list[str], int, tuple[str, ...]]] = []
    left = list(texts)

    def complete(prompts: Sequence[str], max_new_tokens: int, stop_texts: Sequence[str]) -> list[str]:
        asked.append((list(prompts), max_new_tokens, tuple(stop_texts)))
        return [left.pop(0) for _ in prompts]

    return complete, asked


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (" Four. ", "four"),
        ("“The\n  Cat!”", "the cat"),
        ("ﬁve", "five"),
        ("STRASSE", "straße".casefold()),
        ("it's", "it's"),
        ("...", ""),
        ("-3.5", "-3.5"),
    ],
)
def test_texts_are_normalized(text: str, same: str) -> None:
    assert normalized(text) == same


def test_an_answer_ends_at_the_first_stop_text() -> None:
    assert before_stops("a\nb. c", (".", "\n")) == "a"
    assert before_stops("  four five", (" ",)) == "four"
    assert before_stops("abc", ()) == before_stops("abc", ("\n",)) == "abc"


def test_figures_mistakes_and_prompts(tmp_path: Path) -> None:
    complete, asked = answering(" FOUR!\nNext", " azure", " deep")
    task = ExactMatch(data=write(tmp_path, *ROWS), template="Q: {prompt}\nA:", max_new_tokens=7, folder=tmp_path)
    result = task.run(FakeScorer(), BYTES, None, TaskOptions(complete=complete))
    assert asked == [(["Q: Two and two?\nA:", "Q: Sky?\nA:", "Q: Sea?\nA:"], 7, ("\n",))]
    assert result.figures == {"exact_match": pytest.approx(2 / 3)}
    assert [(item["exact_match"], item["predicted"]) for item in result.per_item] == [
        (1.0, "four"), (1.0, "azure"), (0.0, "deep"),
    ]  # fmt: skip
    (mistake,) = result.wrong
    assert (mistake.context, mistake.expected, mistake.predicted) == ("Sea?", "four", " deep")


def test_texts_can_be_compared_as_they_are(tmp_path: Path) -> None:
    complete, _ = answering(" Four", " Blue", "four\n")
    task = ExactMatch(data=write(tmp_path, *ROWS), normalize="none", folder=tmp_path)
    result = task.run(FakeScorer(), BYTES, None, TaskOptions(complete=complete))
    assert [item["exact_match"] for item in result.per_item] == [0.0, 1.0, 1.0]


def test_baselines(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("?blue\n?blue\n?blue\n")
    complete, _ = answering("", "", "")
    task = ExactMatch(data=write(tmp_path, *ROWS), train="train.txt", max_new_tokens=5, folder=tmp_path)
    result = task.run(FakeScorer(), BYTES, None, TaskOptions(complete=complete, baselines=Baselines(BYTES)))
    assert result.figures["exact_match"] == 0.0
    assert result.baselines["frequent"]["exact_match"] == pytest.approx(2 / 3)
    assert result.baselines["bigram"]["exact_match"] == pytest.approx(1 / 3)  # after "?" it writes "blue"
    assert result.baselines["unigram"]["exact_match"] == 0.0


def test_prompts_are_answered_in_batches(tmp_path: Path) -> None:
    complete, asked = answering(*["x"] * 70)
    seen: list[tuple[int, int]] = []
    task = ExactMatch(data=write(tmp_path, *[ROWS[0]] * 70), folder=tmp_path)
    options = TaskOptions(complete=complete, on_progress=lambda done, total: seen.append((done, total)))
    assert task.run(FakeScorer(), BYTES, None, options).count == 70
    assert [len(prompts) for prompts, _, _ in asked] == [32, 32, 6]
    assert seen == [(32, 70), (64, 70), (70, 70)]


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path, {"prompt": "a", "answers": []})
    complete, _ = answering()
    with pytest.raises(ConfigError, match=r"exact_match:items \(exact_match\) requires text generation, unavailable"):
        ExactMatch(data=data, folder=tmp_path).run(FakeScorer(), BYTES)
    with pytest.raises(DataError, match=r'line 1: "answers" must be a list of texts, not \[\]'):
        ExactMatch(data=data, folder=tmp_path).run(FakeScorer(), BYTES, None, TaskOptions(complete=complete))
    write(tmp_path)
    with pytest.raises(DataError, match=r"items\.jsonl holds no prompt"):
        ExactMatch(data=data, folder=tmp_path).run(FakeScorer(), BYTES, None, TaskOptions(complete=complete))
    with pytest.raises(ConfigError, match=r"--template Q: must hold \{prompt\}"):
        ExactMatch(data="x", template="Q:")
