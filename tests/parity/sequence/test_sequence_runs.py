"""Whole runs with ranks that share sequences: what is learned, measured and resumed is that of one process."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.engine.engine import Engine
from megatron.observe.metrics_file import read_records, read_steps
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, train_here, write_tiny_corpus

pytestmark = [pytest.mark.slow, pytest.mark.full]

# Lengths that no layout divides: samples are padded.
NETWORK = {
    "seq_length": 30,
    "num_attention_heads": 4,
    "attention_dropout": 0,
    "hidden_dropout": 0.1,
    "micro_batch_size": 1,
}
DOCUMENTS = ("--reset-attention-mask", "--reset-position-ids")
SHORT = {"train_iters": 3, "eval_interval": 2}

# What is learned: flags, the layout of four ranks, and the metrics of a step that are compared.
OBJECTIVES: dict[str, tuple[Sequence[str], dict[str, Any], Sequence[str]]] = {
    "distillation": (
        ("--kd",),
        {"context_parallel_size": 4, "kd_beta_ce": 5.0, "kd_temp": 2.0},
        ("lm_loss", "distillation_loss", "gradient_norm"),
    ),
    "curriculum": (
        ("--curriculum-learning", *DOCUMENTS),
        {
            "context_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "curriculum_min_length": 8,
            "curriculum_steps": 3,
        },
        ("lm_loss", "gradient_norm", "consumed_tokens"),
    ),
}
LAYOUTS = ("tensor_model_parallel_size", "context_parallel_size")

# One run, each part of which goes on from the checkpoint of the one before in another layout.
CHAIN = (
    (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": (), "exit_interval": 1}),
    (4, {"context_parallel_size": 4, "zero_stage": 2, "exit_interval": 2}),
    (2, {"zero_stage": 3, "exit_interval": 3}),
    (1, {}),
)

Samples = list[tuple[int, int]]


def train_all(rank: int, commands: Sequence[list[str]]) -> list[tuple[tuple[int, str], Samples]]:
    """Runs one command after the other; returns what each came to, and the samples it trained on with a checksum."""
    trained: Samples = []
    train_batch: Callable[..., Any] = Engine.train_batch

    def recorded(engine: Engine, batches: Sequence[Any], *rates: float) -> Any:
        for batch in batches:
            rows = zip(batch.sample_ids.tolist(), batch.tokens, batch.labels, strict=True)
            trained.extend((number, zlib.crc32(tokens.tobytes() + labels.tobytes())) for number, tokens, labels in rows)
        return train_batch(engine, batches, *rates)

    results = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Engine, "train_batch", recorded)
        for command in commands:
            trained.clear()
            results.append((train_here(rank, command), list(trained)))
    return results


def command(corpus: TinyCorpus, folder: Path, name: str, *, alone: bool) -> list[str]:
    """A run of an objective, in its layout or in one process."""
    words, pairs, _ = OBJECTIVES[name]
    if alone:
        pairs = {key: value for key, value in pairs.items() if key not in LAYOUTS}
    if name == "distillation":
        pairs = {**pairs, "load_teacher": corpus.folder / "teacher"}
    else:
        prompts, tasks = (corpus.folder / name for name in ("prompts.txt", "tasks.json"))
        pairs = {**pairs, "sample_prompts": prompts, "sample_tokens": 4, "eval_tasks": tasks}
    return corpus.flags(*words, **{**NETWORK, **SHORT, "run_dir": folder / name / "run", **pairs})


def link(corpus: TinyCorpus, folder: Path, **layout: Any) -> list[str]:
    """A part of the chain, or all of it."""
    return corpus.flags(*DOCUMENTS, folder=folder, **{**NETWORK, "train_iters": 4, "save_interval": 1, **layout})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "prompts.txt").write_text("a text that is\nsome words and\n")
    (folder / "text.txt").write_text("a text that is longer than the few positions of the network " * 4)
    (folder / "tasks.json").write_text(json.dumps([{"task": "perplexity", "data": "text.txt"}]))
    return write_tiny_corpus(folder)


@pytest.fixture(scope="module")
def folders(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Samples]]:
    """The runs of one process and of several; the samples of the one process's chain, and of each part of the other."""
    alone, shared = (tmp_path_factory.mktemp(name) for name in ("alone", "shared"))
    teacher = {"save": corpus.folder / "teacher", "save_interval": 3, "run_dir": alone / "teacher", "num_layers": 3}
    teaching = corpus.flags(**{**NETWORK, **SHORT, **teacher})
    references = [command(corpus, alone, name, alone=True) for name in OBJECTIVES]
    (results,) = run_ranks(train_all, 1, [teaching, link(corpus, alone / "chain"), *references])
    assert [outcome for outcome, _ in results] == [(0, "")] * len(results)
    trained = [results[1][1]]
    for number, (ranks, layout) in enumerate(CHAIN):
        commands = [link(corpus, shared / "chain", **layout)]
        if number == 0:
            commands += [command(corpus, shared, name, alone=False) for name in OBJECTIVES]
        of_ranks = run_ranks(train_all, ranks, commands, timeout_seconds=300)
        for results in of_ranks:
            assert {outcome for outcome, _ in results} == {(0, "")}, results
        trained.append(sorted({sample for results in of_ranks for sample in results[0][1]}))
    return alone, shared, trained


@pytest.mark.full
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_that_of_one_process(folders: tuple[Path, Path, list[Samples]], name: str) -> None:
    fields = OBJECTIVES[name][2]
    wanted, measured = (
        [[record[field] for field in fields] for _, record in sorted(read_steps(folder / name / "run").items())]
        for folder in folders[:2]
    )
    assert len(wanted) == len(measured) == SHORT["train_iters"]
    for found, true in zip(measured, wanted, strict=True):
        assert found == pytest.approx(true, rel=4e-6), name
        assert found[0] == pytest.approx(true[0], rel=1e-6), name
    records = (read_records(folder / name / "run") for folder in folders[:2])
    evaluated = [[record["lm_loss"] for record in of_run if record["kind"] == "evaluation"] for of_run in records]
    assert len(evaluated[0]) >= 2 and evaluated[1] == pytest.approx(evaluated[0], rel=1e-6)


def test_texts_and_tasks_in_training_are_those_of_one_process(folders: tuple[Path, Path, list[Samples]]) -> None:
    texts, figures = [], []
    for folder in folders[:2]:
        run = folder / "curriculum" / "run"
        lines = (run / "samples.jsonl").read_text().splitlines()
        texts.append([json.loads(line)["samples"] for line in lines])
        figures.append([record["figures"]["loss"] for record in read_records(run) if record["kind"] == "task"])
    assert len(texts[0]) == len(figures[0]) == 2 and texts[0] == texts[1]
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)


def test_a_run_goes_on_in_any_other_layout(folders: tuple[Path, Path, list[Samples]]) -> None:
    alone, shared, (whole, *parts) = folders
    assert [sample for part in parts for sample in part] == sorted(whole)  # each sample once, bit for bit, in its part
    assert [len(part) for part in parts] == [4, 4, 4, 4]
    wanted, found = (read_steps(folder / "chain" / "run") for folder in (alone, shared))
    assert sorted(found) == sorted(wanted) == list(range(1, 5))
    for step, record in wanted.items():
        assert found[step]["lm_loss"] == pytest.approx(record["lm_loss"], rel=1e-6), step
        assert found[step]["gradient_norm"] == pytest.approx(record["gradient_norm"], rel=4e-6), step
