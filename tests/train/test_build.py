"""What a run answers by itself, and what is settled before anything expensive starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pretrain_gpt
from megatron.checkpoint.record import Progress
from megatron.config import Machine, TokenizerFacts, resolve
from megatron.data.build import SplitDatasets
from megatron.data.datasets.sample import Sample
from megatron.errors import ExitCode, PeerLostError
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.network import LayerKind, LayerSpec
from megatron.parallel.mesh import ParallelMesh
from megatron.train.run import Run
from megatron.train.run_data import RunData
from megatron.train.start_up import environment
from megatron.train.start_up.engine_opening import parameter_counts
from megatron.train.stop import Stopping
from megatron.train.watchdog import Watch
from tests.config.command_lines import small
from tests.helpers.tiny_run import train, write_tiny_corpus

_MESH = ParallelMesh.single()


class Numbers:
    """A dataset whose sample `i` is the tokens i, i + 1, ..."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> np.ndarray:
        return self.read(index).tokens

    def read(self, index: int) -> Sample:
        return Sample(np.arange(index, index + 5, dtype=np.int64))


def run_of(text: str = "", *, train: Any = None, progress: Progress | None = None) -> Run:
    """A run without an engine, micro-batches of 2 and a global batch of 8."""
    config, mesh = resolve(small(text), Machine("cpu", 1, False, True), TokenizerFacts(1000, 999, "f")), _MESH
    nothing: Any = None
    plan: Any = SimpleNamespace(train=None)
    tokenizer: Any = SimpleNamespace(eod_id=999)
    data = RunData(config, mesh, tokenizer, SplitDatasets(train, {"valid": "v"}, {"test": "t"}), plan)
    return Run(config, mesh, nothing, data, nothing, Stopping(nothing, mesh), Watch(), progress or Progress())


@pytest.mark.parametrize(
    ("step", "interval", "is_due"),
    [(4, 2, True), (3, 2, False), (5, None, False), (6, 1, True)],
)
def test_actions_at_intervals(step: int, interval: int | None, is_due: bool) -> None:
    assert run_of(progress=Progress(step)).is_due(interval) is is_due


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_follow_the_consumed_samples(workers: int) -> None:
    run = run_of(f"--num-workers {workers}", train=Numbers())
    seen = []
    for consumed in (0, 8, 16, 40):  # the last one jumps, as a skipped range does
        run.progress = Progress(0, consumed)
        seen.append([batch.tokens[:, 0].tolist() for batch in run.train_batches()])
    run.data.close()
    assert seen == [[[start + i, start + i + 1] for i in (0, 2, 4, 6)] for start in (0, 8, 16, 40)]


def test_parameters_are_counted_with_and_without_embeddings_and_frozen_ones() -> None:
    kinds = [(LayerKind.EMBEDDING, 100), (LayerKind.EMBEDDING, 20), (LayerKind.BLOCK, 7)]
    layers = [
        (LayerSpec("any", kind, LayerCost(0), object), nn.ParameterList([nn.Parameter(torch.zeros(size))]))
        for kind, size in kinds
    ]
    layers[2][1].requires_grad_(False)
    tied = layers[2][0], layers[0][1]  # counts once
    stack = SimpleNamespace(named_layers=lambda: [*layers, tied])
    engine: Any = SimpleNamespace(mesh=ParallelMesh.single(), stack=stack)
    assert parameter_counts(engine) == (127, 7, 120)


def test_an_active_kill_switch_prevents_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    switch, corpus = tmp_path / "stop", write_tiny_corpus(tmp_path)
    switch.touch()
    assert pretrain_gpt.train(corpus.flags("--kill-switch-path", str(switch), folder=tmp_path)) == ExitCode.DONE
    assert capsys.readouterr().out == f"Detected kill switch at {switch}. Exiting\n"


def test_a_lost_rank_is_one_sentence_that_asks_for_the_same_command() -> None:
    text = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4781. This is typically"
    with (
        pytest.raises(PeerLostError, match=r"another rank of this run exited .* \(Connection closed by peer \[127"),
        environment._explain_lost_peers(),
    ):
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="shape"), environment._explain_lost_peers():
        raise RuntimeError("a wrong shape")


def test_a_new_run_says_what_gradients_of_experts_depend_on(tmp_path: Path) -> None:
    corpus, said = write_tiny_corpus(tmp_path), "so gradients depend on --micro-batch-size"
    for stop in (1, None):  # the second start resumes
        flags = corpus.flags("--num-experts", "2", folder=tmp_path, train_iters=2, eval_iters=0, exit_interval=stop)
        assert train(flags) == (0, "")
        assert (tmp_path / "run" / "log.txt").read_text().count(said) == 1
