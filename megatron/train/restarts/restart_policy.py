"""Decides whether a run that keeps failing may start again, by how its earlier starts ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron import __version__, log
from megatron.config import RunConfig, SafetyConfig
from megatron.errors import ExitCode, MegatronError
from megatron.parallel.agreement import run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.train.restarts.history import Attempt, RestartHistory
from megatron.train.restarts.restore import Start

# What decides the outcome of a step; sizes of the machine may change between restarts without anyone's doing.
_SECTIONS = ("model", "precision", "recompute", "documents", "loss", "random", "kernels", "optim", "data")
_FIELDS = (
    ("parallel", "tensor_model_parallel_size"),
    ("parallel", "pipeline_model_parallel_size"),
    ("parallel", "zero_stage"),
    ("safety", "skip_train_iteration_range"),
    ("safety", "max_bad_steps"),
    ("safety", "skip_spikes"),
)
_MOST_SHOWN = 10


def check_history(config: RunConfig, mesh: ParallelMesh, start: Start, history: RestartHistory) -> tuple[int, ...]:
    """Reads how earlier starts of the run ended, and opens the history of this one; collective over the mesh.

    Returns:
        the steps before which a batch is passed over, one entry for each batch.

    Raises:
        MegatronError: the run keeps ending at one step, and must not start without a change.
    """
    save, safety = config.saving.save, config.safety
    if save is None or config.evaluation.eval_only:
        if safety.resume_skip_poisoned and mesh.world.rank == 0:
            log.warning("--resume-skip-poisoned has no effect without --save, whose folder holds the run's history")
        return ()
    is_resume = start.saved is not None and not config.loading.finetune
    resumed_step = start.saved.record.progress.step if start.saved is not None and is_resume else 0

    def begin() -> list[Any]:
        settings = settings_digest(config.to_json())
        attempts = history.open(Path(save), start.identity.run_id)
        refusal, passes = decide(attempts, resumed_step, settings, safety)
        if refusal is None:
            history.started(resumed_step, settings, passes, __version__)
        return [refusal, passes]

    refusal, passes = run_on_first(mesh, begin)
    if refusal:
        raise MegatronError(refusal)
    return tuple(passes)


def decide(
    attempts: Sequence[Attempt], resumed_step: int, settings: str, safety: SafetyConfig
) -> tuple[str | None, tuple[int, ...]]:
    """Refuses the start of a run that has ended at one step --max-failed-starts times and saved nothing since.

    An end counts if it came during training and was not asked for. Ends in NaN can be answered by passing over the
    batch (--resume-skip-poisoned), at one step at most as many times as starts may fail there, so that broken weights
    do not use up all data.

    Args:
        attempts: the earlier starts of the run, oldest first; all have ended.
        resumed_step: the step of the checkpoint that the run would continue from.
        settings: as in `Attempt`; a start with others is a new attempt.

    Returns:
        why it may not start, with the history and the ways out, None if it may; and the steps before which a batch is
        passed over, one entry for each batch.
    """
    passes = attempts[-1].passes if attempts and attempts[-1].settings == settings else ()
    failures = _failures_in_a_row(attempts, resumed_step, settings, passes)
    limit = safety.max_failed_starts
    if limit == 0 or len(failures) < limit:
        return None, passes
    step = failures[-1].step or 0
    is_poisoned = all(attempt.code == ExitCode.NUMERICS and attempt.blames_step for attempt in failures[-limit:])
    if safety.resume_skip_poisoned and is_poisoned and passes.count(step) < limit:
        return None, (*passes, step)
    return _refusal(failures, step, limit, resumed_step, passes.count(step), is_poisoned), ()


def settings_digest(config: Mapping[str, Any]) -> str:
    """A digest of what decides the outcome of a step: the program's version, the network, its data and their order.

    Args:
        config: the resolved configuration as `RunConfig.to_json` gives it.
    """
    sections = {name: config.get(name) for name in _SECTIONS}
    fields = [config.get(section, {}).get(name) for section, name in _FIELDS]
    text = json.dumps([__version__, sections, fields], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _failures_in_a_row(
    attempts: Sequence[Attempt], resumed_step: int, settings: str, passes: tuple[int, ...]
) -> list[Attempt]:
    """The latest failures that count, as long as all are at one step and no newer checkpoint was saved between them."""
    failures: list[Attempt] = []
    next_start = resumed_step
    for attempt in reversed(attempts):
        if attempt.was_asked or attempt.step is None:
            continue
        is_same = (attempt.settings, attempt.passes) == (settings, passes)
        if not is_same or attempt.step != (failures or [attempt])[0].step or attempt.resumed_step > next_start:
            break
        failures.insert(0, attempt)
        if attempt.resumed_step != next_start:
            break  # it saved something before it ended, which settles everything before
        next_start = attempt.resumed_step
    return failures


def _refusal(
    failures: Sequence[Attempt], step: int, limit: int, resumed_step: int, passed: int, is_poisoned: bool
) -> str:
    """The message: how the starts ended, and what can be done."""
    ways = []
    if is_poisoned and not passed:
        ways.append(f"--resume-skip-poisoned passes over the batch of iteration {step}, on which all ended in NaN")
    elif is_poisoned and passed < limit:
        ways.append(
            f"--resume-skip-poisoned passes over one more batch of iteration {step}, in addition to {passed}; if that "
            "is NaN again, the weights are bad and not the data"
        )
    ways += [
        "--ckpt-step with --save to another folder continues from an older checkpoint",
        f"--skip-train-iteration-range {step}-{step} (or a longer range) trains on later data",
        "--max-failed-starts 0 tries again without a limit",
    ]
    times = "once" if len(failures) == 1 else f"{len(failures)} times in a row"
    return "\n".join(
        [
            f"this run has ended {times} at iteration {step} without a checkpoint newer than that of iteration "
            f"{resumed_step}, and does not start again (--max-failed-starts {limit}):",
            *(f"  {attempt}" for attempt in failures[-_MOST_SHOWN:]),
            "Fix the cause (a run whose settings have changed starts again), or choose:",
            *(f"  {way}" for way in ways),
        ]
    )
