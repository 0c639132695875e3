"""Runs that fail, are killed and are started again: which run continues, from where, and when it is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.loader import Batch
from megatron.engine.engine import Engine
from megatron.errors import ExitCode
from megatron.observe.metrics_file import read_records
from megatron.train.start_up import engine_opening
from tests.helpers.ranks import RankFailure, run_ranks
from tests.helpers.tiny_run import TinyCorpus, losses, steps, train, train_here, write_tiny_corpus

pytestmark = pytest.mark.slow
FIELDS = ("lm_loss", "gradient_norm", "learning_rate", "consumed_samples")
SYNCHRONOUS = "--no-async-save"  # so that a kill finds the same checkpoints each time
POISON = 17  # the number of a sample; with batches of 4, that of step 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def train_poisoned(rank: int, flags: Sequence[str], killed_at: int | None) -> tuple[int, str]:
    """Trains with one sample whose loss is NaN; `killed_at` is a batch on which the process is killed."""
    trained = Engine.train_batch
    batches_seen = 0

    def train_batch(self: Engine, batches: Sequence[Batch], *rest: Any) -> Any:
        nonlocal batches_seen
        batches_seen += 1
        if batches_seen == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return trained(self, [_spoilt(batch) for batch in batches], *rest)  # type: ignore[arg-type]

    Engine.train_batch = train_batch  # type: ignore[assignment,method-assign]
    return train_here(rank, flags)


def _spoilt(batch: Batch) -> Batch:
    if POISON not in batch.sample_ids:
        return batch
    mask = batch.loss_mask.copy()
    mask[0, 0] = np.nan
    return dataclasses.replace(batch, loss_mask=mask)


def train_killed(rank: int, flags: Sequence[str], step: int | None) -> tuple[int, str]:
    """Trains until a step, on which the process is killed; None kills it while the run is built."""
    trained, built = Engine.train_batch, engine_opening.build_engine

    def train_batch(self: Engine, *inputs: Any) -> Any:
        if self.update_count + 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return trained(self, *inputs)

    def build_engine(*inputs: Any) -> Engine:
        if step is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return built(*inputs)

    Engine.train_batch, engine_opening.build_engine = train_batch, build_engine  # type: ignore[method-assign,assignment]
    return train_here(rank, flags)


def start_and_kill(flags: Sequence[str], step: int | None) -> None:
    with pytest.raises(RankFailure, match="ended without a word"):
        run_ranks(train_killed, 1, list(flags), step)


def test_a_batch_of_nan_is_passed_over_after_three_ends(corpus: TinyCorpus, tmp_path: Path) -> None:
    """The other steps are those of a run that skips this step's data, wherever the run is interrupted."""
    flags = corpus.flags(SYNCHRONOUS, folder=tmp_path / "poisoned", save_interval=2)
    for _ in range(3):
        ((code, text),) = run_ranks(train_poisoned, 1, flags, None)
        assert code == ExitCode.NUMERICS and "iteration 5: loss nan" in text
    ((code, text),) = run_ranks(train_poisoned, 1, flags, None)
    assert code == ExitCode.HUMAN
    assert text.count("ended at iteration 5, exit code 77: iteration 5: loss nan") == 3
    assert "--resume-skip-poisoned skips the batch of iteration 5" in text
    with pytest.raises(RankFailure, match="ended without a word"):
        run_ranks(train_poisoned, 1, [*flags, "--resume-skip-poisoned"], 2)
    ((code, text),) = run_ranks(train_poisoned, 1, flags, None)  # the flag is not needed again
    assert (code, text) == (0, "")
    assert train(corpus.flags(folder=tmp_path / "skipped", skip_train_iteration_range="5-5", save_interval=2))[0] == 0
    assert steps(tmp_path / "poisoned", *FIELDS) == steps(tmp_path / "skipped", *FIELDS)
    passed = {"step": 5, "first_sample": 16, "last_sample": 19}
    assert record_of(tmp_path / "poisoned" / "checkpoints" / "iter_0000008")["passed_batches"] == [passed]
    told = [record for record in read_records(tmp_path / "poisoned" / "run") if record["kind"] == "passed"]
    assert [(record["iteration"], record["passed_batches"]) for record in told] == [(5, 1), (5, 1)]


@pytest.mark.full
def test_a_run_that_is_killed_at_one_step_is_refused_in_the_end(corpus: TinyCorpus, tmp_path: Path) -> None:
    flags = corpus.flags(SYNCHRONOUS, folder=tmp_path, save_interval=4)
    for step in (6, None, 6, None, 6):
        start_and_kill(flags, step)
    for world_size in (1, 2):
        results = run_ranks(train_here, world_size, flags)
        assert {code for code, _ in results} == {ExitCode.HUMAN}, "on every rank"
        assert all(text.count("ended at iteration 6, killed without a message") == 3 for _, text in results)
    assert train([*flags, "--max-failed-starts", "0"]) == (0, "")
    assert sorted(losses(tmp_path)) == list(range(1, 9))


def test_a_run_that_gets_further_each_time_is_never_refused(corpus: TinyCorpus, tmp_path: Path) -> None:
    flags = corpus.flags(SYNCHRONOUS, folder=tmp_path, save_interval=1, max_failed_starts=2)
    for step in (3, 4, 5, 6):
        start_and_kill(flags, step)
    assert train(flags) == (0, "")


def test_an_interrupted_fine_tuning_continues_with_the_same_command(corpus: TinyCorpus, tmp_path: Path) -> None:
    base = tmp_path / "base" / "checkpoints"
    assert train(corpus.flags(folder=tmp_path / "base", train_iters=4))[0] == 0

    def tuning(name: str, load: Path = base) -> list[str]:
        folder = tmp_path / name
        places = {"save": folder / "checkpoints", "run_dir": folder / "run", "load": load}
        return corpus.flags("--finetune", "--no-load-optim", SYNCHRONOUS, save_interval=2, hidden_dropout=0.1, **places)

    assert train(tuning("whole")) == (0, "")
    start_and_kill(tuning("cut"), 1)
    start_and_kill(tuning("cut"), 4)
    assert train(tuning("cut")) == (0, "")
    assert steps(tmp_path / "cut", *FIELDS) == steps(tmp_path / "whole", *FIELDS)
    starts = [record["step"] for record in read_records(tmp_path / "cut" / "run") if record["kind"] == "start"]
    assert starts == [0, 0, 2]
    assert sorted(losses(tmp_path / "cut")) == list(range(1, 9))
    ids = {record_of(path)["run_id"] for path in (tmp_path / "cut" / "checkpoints").glob("iter_*")}
    assert len(ids) == 1 and record_of(base / "iter_0000004")["run_id"] not in ids
    code, text = train(tuning("cut", tmp_path / "whole" / "checkpoints"))
    assert code == ExitCode.STORAGE and "their steps would be mixed in one folder" in text


def test_the_folder_of_another_run_at_the_same_step_is_skipped(corpus: TinyCorpus, tmp_path: Path) -> None:
    for name, lr in (("one", 5e-3), ("two", 4e-3)):
        assert train(corpus.flags(folder=tmp_path / name, lr=lr))[0] == 0
    before = steps(tmp_path / "one", *FIELDS)
    mine, other = (tmp_path / name / "checkpoints" / "iter_0000008" for name in ("one", "two"))
    shutil.rmtree(mine)
    shutil.copytree(other, mine)
    assert train(corpus.flags(folder=tmp_path / "one"), world_size=2)[0] == 0
    assert steps(tmp_path / "one", *FIELDS).keys() == before.keys()
    records = read_records(tmp_path / "one" / "run")
    assert [record["step"] for record in records if record["kind"] == "start"] == [0, 4]
    ids = {record_of(path)["run_id"] for path in mine.parent.glob("iter_*")}
    assert len(ids) == 1 and record_of(other)["run_id"] not in ids


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["record"]
    return record
