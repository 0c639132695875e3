"""Small configurations and step outcomes for the tests of the train package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.checkpoint.record import Progress
from megatron.config import ModelConfig, OptimConfig, ReportConfig, RunConfig
from megatron.config.run_config import sections_of
from megatron.config.run_sections import fields_of
from megatron.engine.gradients.finite_check import FiniteCheck
from megatron.objective.metric import Metric, StepMetrics
from megatron.observe.metrics import measure
from megatron.observe.speed import Workload


def optim_config(**changes: Any) -> OptimConfig:
    """An optimizer section with micro-batch 2 and, unless changed, a global batch of 8."""
    return OptimConfig(**{"micro_batch_size": 2, "global_batch_size": 8, "lr": 1.0, "train_iters": 0, **changes})


def report_config(**changes: Any) -> ReportConfig:
    """A report section with a log line at every step."""
    return ReportConfig(**{"log_interval": 1, **changes})


def run_config(**changes: Any) -> RunConfig:
    """A whole resolved configuration of a tiny run."""
    needed = {"micro_batch_size": 2, "global_batch_size": 8, "lr": 1.0, "train_iters": 0, "seq_length": 36}
    layout = {"distributed_backend": "gloo", "world_size": 1, "data_parallel_size": 1, "effective_zero_stage": 0}
    values = {**vars(model_config()), **needed, **layout, **changes}
    fields = {name: {field.name for field in fields_of(section)} for name, section in sections_of(RunConfig).items()}
    saved = {name: {field: values.pop(field) for field in names & values.keys()} for name, names in fields.items()}
    assert not values, values
    return RunConfig.from_json(saved)


def model_config(**changes: Any) -> ModelConfig:
    """A resolved tiny model."""
    sizes = {
        "num_layers": 2,
        "hidden_size": 12,
        "num_attention_heads": 2,
        "max_position_embeddings": 36,
    }
    return ModelConfig(**{**sizes, "vocab_size": 90, "padded_vocab_size": 96, **changes})


WORKLOAD = Workload(
    tokens_per_sample=16,
    flops_per_sample=2e12,
    device_count=4,
    replica_count=2,
    parameters_without_embeddings=500_000_000,
)


@dataclass(frozen=True)
class Outcome:
    """What an engine would return."""

    loss: float | None = 2.5
    token_count: int = 128
    gradient_norm: float = 0.5
    sample_count: int = 8
    skipped: bool = False
    is_spike: bool = False
    consecutive_bad: int = 0
    loss_scale: float = 1.0
    metrics: StepMetrics = field(default_factory=StepMetrics)
    sums: Mapping[str, Sequence[float]] = field(default_factory=dict)
    finite_check: FiniteCheck | None = None


@dataclass(frozen=True)
class Measured:
    """What a task of --eval-tasks would return."""

    name: str = "cloze"
    count: int = 12
    figures: Mapping[str, float] = field(default_factory=lambda: {"acc": 0.25, "ppl": 7.5})
    errors: Mapping[str, float] = field(default_factory=lambda: {"acc": 0.125})


def metrics(**changes: Any) -> StepMetrics:
    """The metrics of step 7, some with other values."""
    outcome: Any = Outcome(loss=9.87654321, gradient_norm=1.23456)
    step = measure(Progress(7, 56, 896), outcome, WORKLOAD, train_iterations=20, learning_rate=1.5e-4, seconds=0.5)
    for name, value in changes.items():
        step.add(step.get(name, Metric(name, None))._replace(sum=value, weight=1))
    return step
