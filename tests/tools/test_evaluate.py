"""tools/evaluate.py from flags to the file of results, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import CheckpointError, ConfigError, DataError, StorageError
from tests.helpers.ranks import run_ranks
from tests.inference.checkpoints import make_checkpoint
from tools import evaluate
from trident.evaluate.results import read_results

TASKS = """
- {task: perplexity, data: text.txt, window: 32, stride: 8}
- {task: lambada, data: passages.jsonl}
- {task: multiple_choice, data: choices.jsonl, unconditional: true}
- {task: exact_match, data: answers.jsonl, max_new_tokens: 4}
"""
FILES: dict[str, list[dict[str, Any]]] = {
    "passages.jsonl": [{"text": f"return the {word}"} for word in ("value", "list", "seed", "state", "sample", "x")],
    "choices.jsonl": [
        {"question": "import", "choices": ["random", "and"], "answer": "A"},
        {"question": "a list of", "choices": ["the", "a", "numbers"], "answer": 2},
        {"question": "def", "choices": ["seed(self)", "if"], "answer": 0},
    ],
    "answers.jsonl": [{"prompt": "import " + "os, " * number, "answer": "sys"} for number in range(5)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    make_checkpoint(folder)
    (folder / "tasks.yaml").write_text(TASKS)
    (folder / "text.txt").write_text("Return a random element from the sequence. " * 6)
    for name, rows in FILES.items():
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return folder


def flags(folder: Path, output: str, *more: str) -> list[str]:
    return [
        *("--load", str(folder / "checkpoints"), "--tasks", str(folder / "tasks.yaml")),
        *("--train-data", str(folder / "text.txt"), "--output", str(folder / output), *more),
    ]


def run_on_rank(rank: int, argv: list[str]) -> int:
    return evaluate.main(argv)


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    assert evaluate.main(flags(folder, "results.json")) == 0
    return read_results(folder / "results.json")


def test_the_file_says_what_was_measured(folder: Path, results: dict[str, Any]) -> None:
    assert results["checkpoint"] == {"path": str(folder / "checkpoints" / "iter_0000003"), "step": 3}
    assert results["model"]["hidden_size"] == 32 and results["tokenizer"]["vocab_size"] == 600
    assert results["layout"] == {"ranks": 1, "tp": 1, "pp": 1, "dp": 1} and results["seed"] == 1234
    text, passages, choices, answers = results["tasks"]
    assert text["baselines"]["uniform"]["ppl"] == pytest.approx(600)
    assert (passages["count"], choices["count"], answers["count"]) == (6, 3, 5)
    assert len(passages["wrong"]) == len(answers["wrong"]) == 5
    assert set(choices["figures"]) == {"acc", "acc_norm", "acc_unconditional"}
    for task in results["tasks"]:
        assert len(task["per_item"]) == task["count"]
        assert set(task["errors"]) <= set(task["figures"])


@pytest.mark.parametrize("layout", [(), ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")])
def test_two_ranks_measure_the_same(folder: Path, results: dict[str, Any], layout: tuple[str, ...]) -> None:
    assert run_ranks(run_on_rank, 2, flags(folder, "two.json", *layout)) == [0, 0]
    two = read_results(folder / "two.json")
    assert two["layout"]["ranks"] == 2
    for one, other in zip(results["tasks"], two["tasks"], strict=True):
        assert other["figures"] == pytest.approx(one["figures"], rel=1e-5)
        assert other["baselines"] == one["baselines"] and other["wrong"] == one["wrong"]


def test_the_table_and_the_limit(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(flags(folder, "part.json", "--limit", "2", "--no-baselines")) == 0
    shown = capfd.readouterr().out
    assert "lambada:passages (lambada; 2 items)" in shown and "uniform" not in shown
    assert [task["count"] for task in read_results(folder / "part.json")["tasks"]] == [2, 2, 2, 2]


def test_a_single_task_from_flags(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["--load", str(folder / "checkpoints"), "--task", "lambada", "--data", str(folder / "passages.jsonl")]
    assert evaluate.main([*argv, "--set", "strict=false", "name=last token"]) == 0
    shown = capfd.readouterr().out
    assert "last token (lambada; 6 items)" in shown and "uniform" in shown and "bigram" not in shown


def test_results_of_other_tasks_outlive_one_that_fails(folder: Path) -> None:
    (folder / "broken.jsonl").write_text('{"text": "fine here"}\n{"txt": 1}\n')
    tasks = folder / "with_broken.yaml"
    tasks.write_text(
        "- {task: lambada, data: broken.jsonl}\n- {task: lambada, data: passages.jsonl}\n"
        "- {task: cloze, data: none.txt}\n"
    )
    output = folder / "partly.json"
    argv = ["--load", str(folder / "checkpoints"), "--tasks", str(tasks), "--output", str(output)]
    with pytest.raises(DataError, match=r'broken\.jsonl line 2 has no "text"'):
        evaluate.main(argv)
    broken, passages, missing = read_results(output)["tasks"]
    assert 'line 2 has no "text"' in broken["failure"] and passages["count"] == 6
    assert "none.txt cannot be read" in missing["failure"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--load", "x"], "expected either --tasks FILE, or --task KIND"),
        (
            ["--load", "x", "--tasks", "a", "--task", "lambada", "--data", "b"],
            "expected either --tasks FILE, or --task",
        ),
        (["--load", "x", "--tasks", "a", "--set", "b=1"], "--data and --set require --task KIND"),
        (["--load", "x", "--task", "lambada"], "--task lambada requires --data FILE"),
        (
            ["--load", "x", "--task", "lambada", "--data", "a", "--set", "strict"],
            "--set strict is invalid. Expected key=value",
        ),
        (["--load", "x", "--task", "lambada", "--data", "a", "--set", "data=b"], "the key data is given twice"),
        (["--load", "x", "--task", "lambada", "--data", "a", "--set", "stride=3"], "unknown key 'stride'"),
        (["--load", "x", "--task", "hellaswag", "--data", "a"], "`task` 'hellaswag' is unknown"),
        (["--load", "x", "--tasks", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--load", "x", "--tasks", "a", "--limit", "0"], "--limit 0 is out of range"),
        (["--tasks", "a"], "--load is required"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_loaded(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        evaluate.main(argv)


def test_a_place_that_cannot_be_written_is_refused_before_the_checkpoint_is_loaded(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"--output {folder} is a folder"):
        evaluate.main(["--load", "nowhere", "--tasks", str(folder / "tasks.yaml"), "--output", str(folder)])
    inside = folder / "tasks.yaml" / "results.json"
    with pytest.raises(StorageError, match=str(inside)):
        evaluate.main(["--load", "nowhere", "--tasks", str(folder / "tasks.yaml"), "--output", str(inside)])
    with pytest.raises(CheckpointError, match="there is no checkpoint in nowhere"):
        evaluate.main(["--load", "nowhere", "--tasks", str(folder / "tasks.yaml")])
