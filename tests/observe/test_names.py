"""What every destination shows of a step with every metric: names, order and values as they have always been.

The expected texts are in `golden/step.json`. Programs of users parse them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint.record import Progress
from megatron.engine.gradients.gradient_stats import NOISE, NORMS, ZEROS, GradientStats
from megatron.engine.weight_norms import norm_metrics
from megatron.model.blocks.router import BALANCE_LOSS, ENTROPY, PASSES, Z_LOSS, dropped_tokens, expert_tokens
from megatron.objective import distillation, language_model, masked, multi_token
from megatron.objective.metric import Metric, MetricSpec, Reduction, StepMetrics, metrics_of
from megatron.observe.console import LogPosition
from megatron.observe.destinations.tensorboard import step_scalars
from megatron.observe.metrics_file import MetricsFile
from megatron.observe.names import named
from megatron.observe.report import Pace, Report, ReportOutputs
from megatron.observe.styles import megatron, short
from tests.train.samples import WORKLOAD, Outcome, optim_config, report_config

GOLDEN = Path(__file__).parent / "golden" / "step.json"
EVERYTHING = dataclasses.replace(WORKLOAD, model_flops_per_sample=1e12, peak_flops_per_second=8e12, stages=3)
SPECS = {
    language_model.SOURCE_LOSSES: MetricSpec(("web/a_text", "none", "books"), Reduction.WEIGHTED_MEAN),
    language_model.Z_LOSS: MetricSpec(),
    language_model.SAMPLE_LOSS: MetricSpec(),
    masked.ORDER_LOSS: MetricSpec(),
    distillation.DISTILLATION_LOSS: MetricSpec(),
    multi_token.MTP_LOSSES: MetricSpec(("mtp_1", "mtp_2")),
}
SUMS = {
    language_model.SOURCE_LOSSES: (6.0, 0.0, 8.0, 2.0, 0.0, 4.0),
    language_model.Z_LOSS: (3.0, 128.0),
    language_model.SAMPLE_LOSS: (6.0, 4.0),
    masked.ORDER_LOSS: (1.0, 8.0),
    distillation.DISTILLATION_LOSS: (5.0, 4.0),
    multi_token.MTP_LOSSES: (6.0, 8.0, 4.0, 2.0),
}
ROUTED = {
    BALANCE_LOSS: (5.0,),
    Z_LOSS: (10.0,),
    ENTROPY: (3.0,),
    PASSES: (4.0,),
    expert_tokens(0): (6.0, 2.0, 0.0, 0.0),
    expert_tokens(2): (2.0, 2.0, 3.0, 1.0),
}
DROPPED = {dropped_tokens(0): (3.0, 0.0, 0.0, 0.0), dropped_tokens(2): (0.0, 0.0, 1.0, 0.0)}
GRADIENTS = SimpleNamespace(layers=("embedding", "decoder.layers.0"), sizes={NORMS: 2, ZEROS: 1, NOISE: 2})


def outcome_of(sums: Mapping[str, Sequence[float]], routed: Any, gradients: Any = (), **values: Any) -> Outcome:
    """A step with these sums."""
    metrics = StepMetrics()
    for name, spec in SPECS.items():
        metrics.add(*spec.metrics(name, sums[name]))
    if gradients:
        metrics.add(*GradientStats.metrics(GRADIENTS, torch.tensor(gradients, dtype=torch.float64), 1, 8))
    return Outcome(metrics=metrics, sums=routed, **values)


def full(
    noise: float = 12.0, signal: float = 4.0, sums: Mapping[str, Sequence[float]] = SUMS, **changes: Any
) -> Outcome:
    """A step of which everything is measured."""
    gradients = (0.25, 0.5, 12.0, signal + noise, signal + noise / 8)
    return outcome_of(sums, {**ROUTED, **DROPPED}, gradients, loss_scale=65536.0, **changes)


class Taker:
    """A destination that notes what W&B and TensorBoard would be given."""

    name, is_buffered = "the taker", False

    def __init__(self) -> None:
        self.scalars: list[dict[str, Any]] = []
        self.values: list[dict[str, float]] = []
        self.short: list[str] = []

    def step(self, metrics: StepMetrics) -> None:
        config = report_config(log_timers_to_tensorboard=True, log_batch_size_to_tensorboard=True)
        self.scalars.append(
            dict(sorted(step_scalars(metrics, config, EVERYTHING, ("loss_train", "loss_valid")).items()))
        )

    def interval(self, metrics: StepMetrics) -> None:
        self.values.append(dict(sorted(named(metrics, "wandb"))))
        self.short += short.iteration_lines(metrics, LogPosition(3, 9))

    def close(self) -> None:
        pass


def waits(data: float, communication: float, transfers: float, memory: int) -> list[Metric]:
    """What a step waited for."""
    seconds = {"data_wait_seconds": data, "communication_seconds": communication, "transfer_seconds": transfers}
    return [*metrics_of(seconds, Reduction.RATE), Metric("memory_bytes", memory, reduction=Reduction.LAST)]


def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What all destinations show of an interval of three steps, one of them skipped, of a plain and an empty step."""
    taker, times = Taker(), iter([0.0, 10.0, 12.0, 14.0, 16.0, 18.0])
    file = MetricsFile(tmp_path / "metrics.jsonl")
    report = Report(
        report_config(log_interval=100),
        optim_config(train_iters=9),
        EVERYTHING,
        ReportOutputs(megatron, [file, taker]),
        pace=Pace(lambda: next(times)),
        shows_loss_scale=True,
    )
    norms = list(norm_metrics(("embedding", "decoder.layers.0"), torch.tensor([3.0, 4.0])))
    report._pace.mark(0)
    report.step(Progress(1, 8, 128), full(), 0.1, 0.5, waits(0.25, 0.125, 0.0625, 2**31))
    second = full(4.0, 4.0, {**SUMS, masked.ORDER_LOSS: (3.0, 8.0)}, loss=3.5)
    report.step(Progress(2, 16, 256), second, 0.1, 0.5, [*waits(0.75, 0.375, 0.1875, 2**32), *norms])
    skipped = full(loss=9.0, skipped=True)
    report.step(Progress(3, 24, 384), skipped, 0.2, 1.0, [*waits(0.5, 0.25, 0.125, 2**32), *norms])
    report.flush()
    report.step(Progress(4, 32, 512), outcome_of(SUMS, ROUTED, gradient_norm=0.125), 0.3, 0.5)
    report.flush()
    nothing, unrouted = ({name: (0.0,) * len(values) for name, values in sums.items()} for sums in (SUMS, ROUTED))
    empty = outcome_of(nothing, unrouted, loss=None, token_count=0, gradient_norm=0.0)
    report.step(Progress(5, 40, 640), empty, 0.3, 0.5)
    report.close()
    return {
        "lines": capsys.readouterr().out.splitlines(),
        "short": taker.short,
        "records": (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines(),
        "tensorboard": taker.scalars,
        "wandb": taker.values,
    }


def test_every_destination_shows_what_it_always_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = json.loads(json.dumps(shown(tmp_path, capsys)))
    assert found.keys() == golden.keys()
    for destination, expected in golden.items():
        assert found[destination] == expected, destination
