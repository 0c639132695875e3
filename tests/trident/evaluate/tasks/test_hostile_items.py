"""Arbitrary task descriptions and files give a result or an error that names the problem."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.config.flags.fields import flags_of
from megatron.errors import MegatronError
from tests.trident.evaluate.fakes import ByteTokenizer, FakeScorer
from trident.evaluate.baselines import Baselines
from trident.evaluate.results import EvaluatedTask, read_results, result_lines, write_results
from trident.evaluate.tasks.task import TaskOptions
from trident.evaluate.tasks.tasks_file import KINDS, task_from

CASES = 400
VALUES: tuple[Any, ...] = (
    None, True, 3, -1, 0, 1, 1e400, math.nan, "", "a", " ", "XXXXX", "a XXXXX b", "\ud800", "\0", "A", "z" * 50, "a b",
    "{question}", "{prompt}", "none", "\u2028", [], ["a"], ["a", "b"], ["a", ["b"]], [None], {}, {"a": 1},
)  # fmt: skip
KEYS = ("text", "question", "query", "prompt", "answer", "answers", "choices", "candidates", "context")
GOOD = {
    "text": "a b", "question": "q XXXXX", "prompt": "p", "answer": "A", "choices": ["A", "b"], "candidates": ["A", "b"],
}  # fmt: skip


def spoilt_rows(drawn: random.Random) -> str:
    """Lines of a jsonl file, of which some are as they should be."""
    rows = []
    for _ in range(drawn.randrange(0, 3)):
        row = dict(GOOD)
        for _ in range(drawn.randrange(0, 3)):
            row[drawn.choice(KEYS)] = drawn.choice(VALUES)
        if drawn.random() < 0.3:
            row.pop(drawn.choice(list(row)))
        rows.append(json.dumps(row))
    text = "\n".join(rows)
    if drawn.random() < 0.2 and text:
        place = drawn.randrange(len(text))
        text = text[:place] + drawn.choice(["\0", "{", "\t1 x\t", "", "\ufeff"]) + text[place + 1 :]
    return text


def spoilt_description(drawn: random.Random, data: str) -> dict[str, Any]:
    kind = drawn.choice(list(KINDS))
    changes = {
        drawn.choice([flag.field for flag in flags_of(KINDS[kind])]): drawn.choice([*VALUES, data, 4, 8])
        for _ in range(drawn.choice([0, 0, 1, 2]))
    }
    return {"task": kind, "data": data, **changes}


@pytest.mark.parametrize("seed", range(2))
def test_nothing_crashes(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    ended: Counter[str] = Counter()
    outcomes = []
    for _ in range(CASES // 2):
        data = drawn.choice(["items.jsonl", "items.txt"])
        (tmp_path / data).write_text(spoilt_rows(drawn))
        tokenizer = ByteTokenizer(has_eod=drawn.random() < 0.8)
        baselines = Baselines(tokenizer, drawn.choice([None, tmp_path / data]))
        options = TaskOptions(baselines, complete=lambda prompts, count, stops: ["A\nb" for _ in prompts])
        try:
            task = task_from(spoilt_description(drawn, data), tmp_path, "here")
            scorer = FakeScorer(max_length=drawn.choice([3, 9, 60]))
            result = task.run(scorer, tokenizer, drawn.choice([None, 1]), options)
        except MegatronError as failure:
            assert str(failure)
            ended[type(failure).__name__] += 1
            continue
        ended["result"] += 1
        assert len(result.per_item) == result.count > 0 and list(result_lines(result))
        outcomes.append(EvaluatedTask(task.title, result))
    write_results(tmp_path / "results.json", {}, outcomes)
    assert len(read_results(tmp_path / "results.json")["tasks"]) == ended["result"]
    assert min(ended[name] for name in ("ConfigError", "DataError", "result")) > 10
