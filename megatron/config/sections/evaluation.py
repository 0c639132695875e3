"""When and on what a run is evaluated, and which samples of its own text it shows."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class EvaluationConfig(ConfigSection):
    """Evaluations during a run, or in place of it."""

    eval_interval: int = flag(1000, "steps between evaluations", at_least=1)
    eval_iters: int = flag(100, "global batches per evaluation; 0 evaluates nothing", at_least=0)
    full_validation: bool = flag(
        False, "evaluate on all validation and test data once, instead of --eval-iters global batches"
    )
    eval_each_epoch: bool = flag(False, "also evaluate at the end of each pass of --epochs")
    eval_tasks: str | None = flag(
        None,
        "YAML or JSON file of tasks (see docs/evaluation.md) that every evaluation also runs; results join the metrics",
        path=PathUse.SMALL_FILE,
    )
    sample_prompts: str | None = flag(
        None,
        "text file with one prompt a line; every evaluation continues them greedily and writes samples.jsonl into the "
        "run folder",
        path=PathUse.SMALL_FILE,
    )
    sample_tokens: int = flag(32, "most new tokens of each sample of --sample-prompts", at_least=1)
    eval_only: bool = flag(False, "evaluate the loaded checkpoint and exit", spelled=("--skip-train",), numeric=True)
