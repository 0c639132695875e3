"""The file of results: complete or as it was, and readable by anything that reads JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import megatron
from megatron.errors import DataError
from trident.evaluate.results import EvaluatedTask, read_results, result_lines, write_results
from trident.evaluate.tasks.task import Mistake, TaskResult

RESULT = TaskResult(
    name="a",
    kind="lambada",
    figures={"acc": 0.25, "ppl": math.inf},
    errors={"acc": 0.1},
    count=8,
    wrong=(Mistake("line 2", "We saw the", " cat", " d\ud800g"),),
    per_item=({"item": "line 1", "acc": 1.0},),
    baselines={"uniform": {"acc": 0.0}},
)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    outcomes = [EvaluatedTask("a", RESULT, None, 1.23456), EvaluatedTask("b", failure="b.jsonl cannot be read")]
    write_results(path, {"checkpoint": {"path": "out/iter_0000003", "step": 3}, "limit": None}, outcomes)
    found = read_results(path)
    assert found["version"] == megatron.__version__ and found["checkpoint"]["step"] == 3 and found["limit"] is None
    first, second = found["tasks"]
    assert first["figures"] == {"acc": 0.25, "ppl": "inf"} and first["errors"] == {"acc": 0.1}
    assert first["wrong"][0]["expected"] == " cat" and first["wrong"][0]["predicted"] == " d\ud800g"
    assert first["wrong"][0]["place"] == "line 2" and len(first["wrong"][0]) == 4
    assert first["per_item"] == [{"item": "line 1", "acc": 1.0}] and first["seconds"] == 1.235
    assert second == {"name": "b", "failure": "b.jsonl cannot be read"}
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "other"}', "[" * 100_000])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"results\.json"):
        read_results(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.json cannot be read as results of an evaluation"):
        read_results(tmp_path / "nowhere.json")


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, {}, [])
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 2}))
    with pytest.raises(DataError, match="holds no results of tools/evaluate.py of this version"):
        read_results(path)


def test_the_network_stands_below_the_baselines() -> None:
    result = TaskResult(
        name="lambada:a",
        kind="lambada",
        figures={"acc": 0.25, "ppl": 12.345},
        errors={"acc": 0.0625},
        count=8,
        wrong=(Mistake("a.jsonl line 2", "We saw\x1b[2J the", " cat", " dog"),),
        baselines={"uniform": {"ppl": 8000.0}, "bigram": {"acc": 0.125, "ppl": 99.5}},
        baseline_errors={"bigram": {"acc": 0.1}},
        notes=("a note",),
    )
    assert list(result_lines(result)) == [
        "lambada:a (lambada; 8 items; a note)",
        "                     acc     ppl",
        "  uniform                   8000",
        "  bigram     0.125 ± 0.1    99.5",
        "  model     0.25 ± 0.062   12.35",
        "  wrong at a.jsonl line 2",
        "    after 'We saw\\x1b[2J the'",
        "    expected ' cat', predicted ' dog'",
    ]
