"""Where the device decides on updates, a run with a bad step ends, saves and reports as where the host does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.engine.engine import Engine
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.errors import ExitCode
from megatron.train.stop import Stopping
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, steps, train_here, write_tiny_corpus

pytestmark = pytest.mark.slow
FIELDS = ("lm_loss", "gradient_norm", "learning_rate", "consumed_samples", "skipped_iterations", "nan_iterations")
POISON = 17  # the number of a sample; with batches of 4, that of step 5


def train_poisoned(rank: int, flags: Sequence[str], on_device: bool) -> tuple[int, str]:
    """Trains with one sample whose loss is NaN; as on a GPU, if the device decides."""
    trained, made, stopping = Engine.train_batch, UpdateGate.__init__, Stopping.__init__

    def train_batch(self: Engine, batches: Sequence[Any], *rest: Any) -> Any:
        assert self.gate.steps_in_flight == on_device and len(self.gate._pending) <= on_device
        return trained(self, [_spoilt(batch) for batch in batches], *rest)

    def make(self: UpdateGate, *given: Any, **options: Any) -> None:
        made(self, *given, **{**options, "on_device": on_device})

    def stop(self: Stopping, *given: Any) -> None:
        stopping(self, *given)
        self.steps_in_flight = int(on_device)

    Engine.train_batch, UpdateGate.__init__, Stopping.__init__ = train_batch, make, stop  # type: ignore[method-assign,assignment]
    return train_here(rank, flags)


def _spoilt(batch: Any) -> Any:
    if POISON not in batch.sample_ids:
        return batch
    mask = batch.loss_mask.copy()
    mask[0, 0] = np.nan
    return dataclasses.replace(batch, loss_mask=mask)


def outcome(folder: Path, codes: list[int]) -> tuple[Any, ...]:
    """Exit codes, steps and checkpoints of a run: their records and the bytes of their tensors."""
    checkpoints = sorted((folder / "checkpoints").glob("iter_*"))
    records = [json.loads((path / "manifest.json").read_text())["record"] for path in checkpoints]
    told = [(record["progress"], record["optimizer_updates"], record.get("recent")) for record in records]
    tensors = [[file.read_bytes() for file in sorted(path.glob("*.safetensors"))] for path in checkpoints]
    return codes, str(steps(folder, *FIELDS)), [path.name for path in checkpoints], told, tensors


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(("flags", "ranks"), [([], 1), (["--bf16"], 2)], ids=["fp32", "bf16 on two ranks"])
def test_a_bad_step_that_is_allowed(corpus: TinyCorpus, tmp_path: Path, flags: list[str], ranks: int) -> None:
    outcomes = []
    for on_device in (False, True):
        folder = tmp_path / str(on_device)
        asked = corpus.flags(folder=folder, save_interval=5, max_bad_steps=1)
        results = run_ranks(train_poisoned, ranks, [*asked, *flags], on_device)
        outcomes.append(outcome(folder, [code for code, _ in results]))
    codes, _, names, told, _ = outcomes[0]
    # the save that is due after the bad step waits for a good one
    assert codes == [0] * ranks and names[0] == "iter_0000006"
    assert told[-1][0]["bad_steps"] == 1 and told[-1][1] == told[-1][0]["step"] - 1
    assert outcomes[0] == outcomes[1]


def test_a_bad_step_that_is_not_allowed(corpus: TinyCorpus, tmp_path: Path) -> None:
    texts, checkpoints = [], []
    for on_device in (False, True):
        folder = tmp_path / str(on_device)
        ((code, text),) = run_ranks(train_poisoned, 1, corpus.flags(folder=folder, save_interval=2), on_device)
        assert code == ExitCode.NUMERICS
        texts.append(text.replace(str(folder), ""))
        checkpoints.append([path.name for path in sorted((folder / "checkpoints").glob("iter_*"))])
    assert "iteration 5: loss nan" in texts[0] and texts[0] == texts[1]
    assert checkpoints[0] == checkpoints[1] == ["iter_0000002", "iter_0000004"]
