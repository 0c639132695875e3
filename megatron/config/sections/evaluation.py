"""Evaluation of a run: interval, data, tasks, and samples of generated text."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class EvaluationConfig(ConfigSection):
    """Evaluations during a run, or instead of training."""

    eval_interval: int = flag(1000, "steps between evaluations", at_least=1)
    eval_iters: int = flag(100, "global batches per evaluation; 0 disables evaluation", at_least=0)
    full_validation: bool = flag(
        False, "evaluate on all validation and test data instead of --eval-iters global batches"
    )
    eval_each_epoch: bool = flag(False, "also evaluate at the end of each epoch of --epochs")
    eval_tasks: str | None = flag(
        None,
        "YAML or JSON file of tasks (docs/evaluation.md) to run at each evaluation; results are logged with the "
        "metrics",
        path=PathUse.SMALL_FILE,
    )
    sample_prompts: str | None = flag(
        None,
        "text file with one prompt per line; each evaluation completes them greedily and writes samples.jsonl to the "
        "run folder",
        path=PathUse.SMALL_FILE,
    )
    sample_tokens: int = flag(32, "maximum number of new tokens per sample of --sample-prompts", at_least=1)
    eval_only: bool = flag(False, "evaluate the loaded checkpoint and exit", spelled=("--skip-train",), numeric=True)
