"""The commands of docs/seeds/dsgpt2.md: vocabulary, pretraining with a kill, and the eight scripts."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from examples.dsgpt2 import ds_trainer
from megatron.data.stores import store_rows
from megatron.observe.metrics_file import read_steps
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from megatron.train.callbacks.evaluator import Evaluator
from megatron.train.callbacks.step_reports import StepReports
from megatron.train.run import Run
from megatron.train.steps import TrainedStep
from tests.helpers.ranks import RankFailure, run_ranks
from tests.seeds.dsgpt2.guide import (
    FINETUNE_STEPS,
    ROOT,
    TRAIN_STEPS,
    commands_of_the_guide,
    dsgpt2_example,
)

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("dsGPT2")]

FIRST = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<sys>", "<usr>")
TEXTS = ("안녕하세요, 세상아!", "İstanbul'da çığ, Iğdır'da ışık", "👍🏽 🇹🇷 👩‍👩‍👧", "tab\tand\r\nlines", "Ａé½")


def test_000_3_vocabulary_from_the_store() -> None:
    run = dsgpt2_example()
    drawn = sorted(path.name for path in (run.folder / "vocab").glob("text*.txt"))
    assert drawn == ["text0.txt", "text1.txt"]  # one a process
    folder = run.folder / "vocab" / "vocab_500"
    files = folder / "demo-vocab.json", folder / "demo-merges.txt"
    vocabulary = json.loads(files[0].read_text())
    unused = [f"<unused{number}>" for number in range(100)]
    assert [vocabulary[token] for token in (*FIRST, *unused)] == list(range(107))
    assert len(vocabulary) == 500
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", *map(str, files)))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode_flat([text])[0].tolist()).encode() == text.encode()
    said = run.output_of("3_vocabulary")
    assert "round trip: 2 of 2 documents come back byte for byte" in said
    assert re.search(r"^speed: [\d,]+ lines/s", said, flags=re.MULTILINE)


STEPS, SAVED_EVERY, KILLED_AT = 30, 10, 16
LEAST_FALL_NATS = 2.0
HELD_OUT = 0.1


def command(folder: Path, *more: str) -> list[str]:
    """dsGPT2's command line, with a network of our size."""
    run = dsgpt2_example()
    return [
        *("--config_train", str(run.folder / "db.json"), "--vocab_load_dir", str(run.folder / "vocab")),
        *("--vocab_id_dir", "vocab_500", "--model_select", "112m", "--truncated_len", "32", "--train_mode", "pretrain"),
        *("--ckpt_dir", str(folder), "--workspace", "test0", "--tr_ratio", str(1 - HELD_OUT)),
        *("--train_iters", str(STEPS), "--ckpt_save_steps", str(SAVED_EVERY), "--distributed-backend", "gloo"),
        *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--lr", "1e-2"),
        *("--micro-batch-size", "4", "--global-batch-size", "8", "--zero-stage", "1", "--eval-interval", "15"),
        *("--num-workers", "0", "--no-async-save", "--run-dir", str(folder / "run"), *more),
    ]


class Observed(NamedTuple):
    """What a rank saw of its training.

    Args:
        trained, evaluated: numbers of the documents that it read for each.
        untouched: of each evaluation, whether weights, gradients and optimizer state stayed as they were.
    """

    code: int
    trained: set[int]
    evaluated: set[int]
    untouched: list[bool]


def state_of(run: Any) -> dict[str, torch.Tensor]:
    """Weights, gradients and optimizer state of a rank."""
    found = {}
    for number, parameter in enumerate(run.engine.parameters()):
        found[f"weight {number}"] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"gradient {number}"] = parameter.grad.clone()
    for number, values in enumerate(run.engine.optimizer.state.values()):
        found |= {f"{name} {number}": value.clone() for name, value in values.items() if torch.is_tensor(value)}
    return found


def observe(rank: int, words: list[str], killed_at: int | None = None) -> Observed:
    """Trains on one rank; this process ends with SIGKILL after a step."""
    read, evaluate, report = store_rows.StoreRows.read, Evaluator.evaluate, StepReports.after_step
    trained: set[int] = set()
    evaluated: set[int] = set()
    reading = [trained]
    untouched: list[bool] = []

    def noted_read(self: Any, rows: np.ndarray) -> Any:
        reading[-1].update(rows.tolist())
        return read(self, rows)

    def noted_evaluate(self: Evaluator, run: Any, *told: Any, **more: Any) -> Any:
        before = state_of(run)
        reading.append(evaluated)
        losses = evaluate(self, run, *told, **more)
        reading.pop()
        after = state_of(run)
        untouched.append(before.keys() == after.keys() and all(torch.equal(after[key], before[key]) for key in before))
        return losses

    def report_and_die(self: StepReports, run: Run, step: TrainedStep) -> None:
        report(self, run, step)
        if step.progress.step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    store_rows.StoreRows.read = noted_read  # type: ignore[method-assign]
    Evaluator.evaluate, StepReports.after_step = noted_evaluate, report_and_die  # type: ignore[method-assign,assignment]
    return Observed(ds_trainer.main(words), trained, evaluated, untouched)


def losses_of(folder: Path) -> dict[int, tuple[float, float]]:
    """The mean losses per token and per sample of each step; after a restart, the later ones."""
    return {step: (record["lm_loss"], record["sample_loss"]) for step, record in read_steps(folder / "run").items()}


def test_000_4_pretraining_survives_a_kill(tmp_path: Path) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    ranks = run_ranks(observe, 2, command(alone))
    losses = losses_of(alone)
    assert losses[1][1] - losses[STEPS][1] >= LEAST_FALL_NATS

    documents = sum(len(one.trained) for one in ranks)
    first_held_out = min(ranks[0].evaluated | ranks[1].evaluated)
    assert documents > 50 and max(ranks[0].trained | ranks[1].trained) < first_held_out
    for one in ranks:
        assert one.code == 0 and one.evaluated
        assert one.untouched == [True] * 4  # at steps 15 and 30, and validation and test at the end

    names = {path.name: path.readlink().name for path in (alone / "test0").glob("epoch*")}
    assert names["epoch0-step10"] == "iter_0000010" and len(names) == STEPS // SAVED_EVERY

    with pytest.raises(RankFailure, match="ended without a word"):
        run_ranks(observe, 2, command(killed), KILLED_AT)
    assert max(losses_of(killed)) == KILLED_AT
    again = command(killed, "--restart", "True", "--ckpt_id", "epoch0-step10")
    assert [one.code for one in run_ranks(observe, 2, again)] == [0, 0]
    assert losses_of(killed) == losses, "every loss after the restart is that of the uninterrupted run"


SCRIPTS = sorted((ROOT / "examples" / "dsgpt2").glob("[0-9]_*.sh"))
LEAST_RIGHT = 0.95


def test_000_7_scripts_run_without_a_container() -> None:
    run = dsgpt2_example()
    named = [word for command in commands_of_the_guide() for word in command.split() if word.endswith(".sh")]
    assert list(dict.fromkeys(named)) == [f"examples/dsgpt2/{path.name}" for path in SCRIPTS]
    assert len(SCRIPTS) == 8
    assert "total: 200 documents" in run.output_of("1_upload")
    assert "total: 188 documents" in run.output_of("2_clean")  # without the short ones and the second copies
    assert "188 documents, " in run.output_of("4_statistics")
    trained, tuned = read_steps(run.folder / "run-pretrained"), read_steps(run.folder / "run-chat")
    assert max(trained) == TRAIN_STEPS and trained[TRAIN_STEPS]["lm_loss"] < trained[1]["lm_loss"] - 1
    assert max(tuned) == FINETUNE_STEPS and tuned[FINETUNE_STEPS]["sample_loss"] < 0.1
    assert "INFO: [Loss (eval)]" in run.output_of("7_evaluate")
    right = re.search(r"^right answers: (\d+) of 15$", run.output_of("7_evaluate"), flags=re.MULTILINE)
    assert right is not None and int(right.group(1)) >= LEAST_RIGHT * 15
