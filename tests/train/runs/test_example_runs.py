"""Fine-tuning from flags to losses: from a pretrained checkpoint, interrupted and resumed by the same command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, losses, steps, train, train_here, write_tiny_corpus

FACTS = ("lm_loss", "consumed_samples")


def train_all(rank: int, commands: Sequence[list[str]]) -> list[tuple[int, str]]:
    """Runs one command after the other in the same processes."""
    return [train_here(rank, command) for command in commands]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    corpus = write_tiny_corpus(tmp_path_factory.mktemp("corpus"))
    records = [
        {"messages": [{"role": "user", "content": f"what is {n}"}, {"role": "assistant", "content": f"{n} it is"}]}
        for n in range(40)
    ]
    (corpus.folder / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return corpus


def command(corpus: TinyCorpus, folder: Path, **changes) -> list[str]:
    """The same command at every start: from the base, unless this run has saved already."""
    flags = {
        "load": corpus.folder / "base", "save": folder / "checkpoints", "save_interval": 4, "run_dir": folder / "run",
        "data_path": corpus.folder / "chat.jsonl", "split": "8,2,0", "hidden_dropout": 0, "attention_dropout": 0,
    }  # fmt: skip
    return corpus.flags("--finetune", "--loss-on-targets-only", "--pack-examples", **{**flags, **changes})


def test_an_interrupted_run_resumes_by_the_same_command(corpus: TinyCorpus, tmp_path: Path) -> None:
    base = corpus.flags(save=corpus.folder / "base", save_interval=4, train_iters=4, run_dir=tmp_path / "base")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    other = tmp_path / "chat.jsonl"
    other.write_text('{"prompt": "q", "answer": "a"}\n' * 40)
    refused = {
        "--pack-examples": [word for word in command(corpus, whole) if word != "--pack-examples"],
        "--chat-template": command(corpus, whole, chat_template="chatml"),
        "The training data differs from the run": command(corpus, whole, data_path=other),
    }
    (results,) = run_ranks(train_all, 1, [base, command(corpus, whole), *refused.values()])
    assert results[:2] == [(0, "")] * 2
    for (code, text), what in zip(results[2:], refused, strict=True):
        assert code != 0 and what in text
    stopped = command(corpus, cut, exit_interval=4, tensor_model_parallel_size=2)
    assert train(stopped, 2) == (0, "")
    assert train(command(corpus, cut, zero_stage=1), 2) == (0, "")
    expected, found = (steps(folder, *FACTS) for folder in (whole, cut))
    assert sorted(expected) == sorted(found) == list(range(1, 9))
    for step in expected:
        assert found[step] == pytest.approx(expected[step], rel=1e-4)
    assert losses(whole)[8] < losses(whole)[1]
