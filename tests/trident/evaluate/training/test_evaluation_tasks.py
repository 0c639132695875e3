"""Tasks in training: checked before it starts, measured at every evaluation, and without effect on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError
from megatron.observe.metrics_file import read_records
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.tiny_run import TinyCorpus, losses, train, write_tiny_corpus
from tests.helpers.vocabulary import write_vocabulary
from tests.train.samples import model_config
from trident.evaluate.training.evaluation_tasks import open_tasks


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def tasks_file(corpus: TinyCorpus) -> Path:
    """A tasks file with a text in windows and questions with three answers."""
    folder = corpus.folder
    (folder / "text.txt").write_text("a text that is longer than the few positions of the network " * 4)
    questions = [{"question": f"{number} and", "choices": ["one", "two", "three"], "answer": 1} for number in range(5)]
    (folder / "questions.jsonl").write_text("\n".join(json.dumps(question) for question in questions))
    path = folder / "tasks.json"
    tasks = [
        {"task": "perplexity", "data": "text.txt", "name": "text"},
        {"task": "multiple_choice", "data": "questions.jsonl", "name": "questions"},
    ]
    path.write_text(json.dumps(tasks))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
def test_results_join_the_metrics_and_leave_training_as_it_was(
    corpus: TinyCorpus, tasks_file: Path, tmp_path: Path
) -> None:
    settings = {"eval_interval": 4, "attention_dropout": 0}
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 1}
    prompts = tasks_file.with_name("prompts.txt")
    prompts.write_text("a text that is\n\nsome words and\n")
    asked = {**settings, "eval_tasks": tasks_file, "sample_prompts": prompts, "sample_tokens": 5}
    assert train(corpus.flags(folder=tmp_path / "without", **settings)) == (0, "")
    assert train(corpus.flags(folder=tmp_path / "with", **asked)) == (0, "")
    assert train(corpus.flags(folder=tmp_path / "split", **asked, **layout), 4) == (0, "")
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    single, split = (
        [record for record in read_records(tmp_path / name / "run") if record["kind"] == "task"]
        for name in ("with", "split")
    )
    assert [(one["task"], one["iteration"]) for one in single] == [
        (name, step) for step in (4, 8, 8) for name in ("text", "questions")
    ]
    assert single[0]["figures"]["loss"] > single[2]["figures"]["loss"] == single[4]["figures"]["loss"]
    assert single[1]["count"] == 5 and set(single[1]["figures"]) >= {"acc", "acc_norm"}
    for one, other in zip(single, split, strict=True):
        assert one["figures"] == pytest.approx(other["figures"], rel=1e-4)
    samples = {name: read_lines(tmp_path / name / "run/samples.jsonl") for name in ("with", "split")}
    assert [one["iteration"] for one in samples["with"]] == [4, 8, 8]
    assert [one["samples"] for one in samples["with"]] == [one["samples"] for one in samples["split"]]
    assert [one["prompt"] for one in samples["with"][0]["samples"]] == ["a text that is", "some words and"]
    assert samples["with"][0]["samples"] != samples["with"][1]["samples"] == samples["with"][2]["samples"]
    assert not (tmp_path / "without/run/samples.jsonl").exists()
    events = read_lines(tmp_path / "split/run/events.jsonl")
    assert [(one["kind"], one["iteration"]) for one in events] == [("save", 4), ("save", 8), ("finished", 8)]
    beats = json.loads((tmp_path / "split/run/heartbeats.json").read_text())
    assert {"pp": 2, "tp": 2}.items() <= dict(beats["axes"]).items()
    assert [rank["rank"] for rank in beats["ranks"]] == [0, 1, 2, 3]


def test_tasks_are_checked_before_training(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "tasks.json", build_tokenizer(write_vocabulary(tmp_path))
    for task, says in (
        ({"task": "exact_match", "data": "a.jsonl"}, "the task exact_match:a of --eval-tasks .* generates text"),
        ({"task": "perplexity", "data": "missing.txt"}, "missing.txt"),
        ({"task": "guess", "data": "a"}, "`task` 'guess' is unknown"),
        ({"task": "perplexity", "data": "empty.txt"}, "holds no item|is empty"),
    ):
        (tmp_path / "empty.txt").write_text("")
        path.write_text(json.dumps([task]))
        with pytest.raises((ConfigError, DataError), match=says):
            open_tasks(str(path), tokenizer, model_config(), ParallelMesh.single())
    assert open_tasks(None, tokenizer, model_config(), ParallelMesh.single()) == ()
