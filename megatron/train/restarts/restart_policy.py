"""The restart policy: refuses to start a run that keeps failing at the same step."""

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

# Settings that affect the outcome of a step. Sizes of the machine, which may change between restarts, are not included.
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
    """Checks the earlier starts of the run, and opens the history of this one; collective over the mesh.

    Returns:
        the steps before which a batch is skipped, one entry per batch.

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
        refusal, skips = decide(attempts, resumed_step, settings, safety)
        if refusal is None:
            history.started(resumed_step, settings, skips, __version__)
        return [refusal, skips]

    refusal, skips = run_on_first(mesh, begin)
    if refusal:
        raise MegatronError(refusal)
    return tuple(skips)


def decide(
    attempts: Sequence[Attempt], resumed_step: int, settings: str, safety: SafetyConfig
) -> tuple[str | None, tuple[int, ...]]:
    """Refuses to start a run that has ended at one step --max-failed-starts times and saved nothing since.

    An end counts if it happened during training and was not requested. With --resume-skip-poisoned, a batch where
    starts end in NaN is skipped, at one step at most --max-failed-starts times, so that broken weights do not consume
    all data.

    Args:
        attempts: the earlier starts of the run, oldest first; all have ended.
        resumed_step: the step of the checkpoint that the run would resume from.
        settings: see `Attempt`; earlier starts with other settings do not count.

    Returns:
        the refusal, with the history and possible remedies, or None; and the steps before which a batch is skipped, one
        entry per batch.
    """
    skips = attempts[-1].batch_skips if attempts and attempts[-1].settings == settings else ()
    failures = _failures_in_a_row(attempts, resumed_step, settings, skips)
    limit = safety.max_failed_starts
    if limit == 0 or len(failures) < limit:
        return None, skips
    step = failures[-1].step or 0
    is_poisoned = all(attempt.code == ExitCode.NUMERICS and attempt.blames_step for attempt in failures[-limit:])
    if safety.resume_skip_poisoned and is_poisoned and skips.count(step) < limit:
        return None, (*skips, step)
    return _refusal(failures, step, limit, resumed_step, skips.count(step), is_poisoned), ()


def settings_digest(config: Mapping[str, Any]) -> str:
    """A digest of the settings that affect the outcome of a step, and the program's version.

    Args:
        config: the resolved configuration from `RunConfig.to_json`.
    """
    sections = {name: config.get(name) for name in _SECTIONS}
    fields = [config.get(section, {}).get(name) for section, name in _FIELDS]
    text = json.dumps([__version__, sections, fields], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _failures_in_a_row(
    attempts: Sequence[Attempt], resumed_step: int, settings: str, skips: tuple[int, ...]
) -> list[Attempt]:
    """The latest consecutive failures at one step, without a newer checkpoint saved in between."""
    failures: list[Attempt] = []
    next_start = resumed_step
    for attempt in reversed(attempts):
        if attempt.was_requested or attempt.step is None:
            continue
        is_same = (attempt.settings, attempt.batch_skips) == (settings, skips)
        if not is_same or attempt.step != (failures or [attempt])[0].step or attempt.resumed_step > next_start:
            break
        failures.insert(0, attempt)
        if attempt.resumed_step != next_start:
            break  # it saved a checkpoint before it ended
        next_start = attempt.resumed_step
    return failures


def _refusal(
    failures: Sequence[Attempt], step: int, limit: int, resumed_step: int, skipped: int, is_poisoned: bool
) -> str:
    remedies = []
    if is_poisoned and not skipped:
        remedies.append(f"--resume-skip-poisoned skips the batch of iteration {step}, where all ended in NaN")
    elif is_poisoned and skipped < limit:
        remedies.append(
            f"--resume-skip-poisoned skips one more batch of iteration {step}, in addition to {skipped}; if that is "
            "NaN again, the weights are bad, not the data"
        )
    remedies += [
        "--ckpt-step with --save to another folder continues from an older checkpoint",
        f"--skip-train-iteration-range {step}-{step} (or a longer range) trains on later data",
        "--max-failed-starts 0 retries without a limit",
    ]
    times = "once" if len(failures) == 1 else f"{len(failures)} times in a row"
    return "\n".join(
        [
            f"this run has ended {times} at iteration {step} without saving a checkpoint newer than iteration "
            f"{resumed_step}, and does not start again (--max-failed-starts {limit}):",
            *(f"  {attempt}" for attempt in failures[-_MOST_SHOWN:]),
            "Fix the cause (a run with changed settings starts again), or use one of these:",
            *(f"  {remedy}" for remedy in remedies),
        ]
    )
