"""Callbacks that guard the numerics of a run: skipped batches, loss spikes, consistency of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron import log
from megatron.checkpoint.record import Progress, Record
from megatron.config.schedule import range_to_skip
from megatron.engine.engine import Engine
from megatron.engine.replicas import find_differences
from megatron.errors import NumericsError
from megatron.train.callback import Callback, CallbackSetup
from megatron.train.run import Run
from megatron.train.steps import TrainedStep


class SkippedRanges(Callback):
    """Skips the data of --skip-train-iteration-range."""

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        return cls() if setup.config.safety.skip_ranges else None

    def before_step(self, run: Run) -> None:
        skipped = range_to_skip(run.config.safety.skip_ranges, run.progress.step)
        if skipped is not None:
            first, last = skipped
            log.info(f"Skipped iterations {first} to {last} due to --skip-train-iteration-range flag.")
            run.skip_batches(last - first + 1)


class SkippedBatches(Callback):
    """Skips batches that made earlier starts fail; the step is taken on the next batch.

    Args:
        steps: the steps before which a batch is skipped; repeat a step to skip several.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = tuple(steps)
        self._skipped: list[Mapping[str, int]] = []

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        return cls(setup.batch_skips)

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        self._skipped = [] if record is None else list(record.passed_batches)

    def before_step(self, run: Run) -> None:
        step, skipped = run.progress.step + 1, []
        for _ in range(self._steps.count(step)):
            first = run.progress.consumed_samples
            run.skip_batches(1)
            skipped.append({"step": step, "first_sample": first, "last_sample": run.progress.consumed_samples - 1})
        for batch in skipped:
            self._skipped.append(batch)
            run.report.skipped_batch(run.progress, batch, len(self._skipped))

    def state(self, run: Run) -> Mapping[str, Any]:
        return {"passed_batches": tuple(self._skipped)}


class Spikes(Callback):
    """Saves the statistics of spike detection, so that a resumed run skips the same steps."""

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        if record is not None:
            engine.gate.restore(record.recent)

    def state(self, run: Run) -> Mapping[str, Any]:
        return {"recent": run.engine.gate.to_json()}


_DESCRIBED = 5


class ReplicaCheck(Callback):
    """Checks that replicated values are equal on all ranks, at an interval and before each save.

    Args:
        interval: in steps; None to check before saves only.
    """

    def __init__(self, interval: int | None) -> None:
        self._interval = interval

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        interval = setup.config.safety.check_replicas_interval
        return cls(interval) if interval != 0 else None

    def after_step(self, run: Run, step: TrainedStep) -> None:
        if run.is_due(self._interval):
            check_replicas(run)

    def before_save(self, run: Run) -> None:
        if not run.is_due(self._interval):  # else checked after this step already
            check_replicas(run)


def check_replicas(run: Run) -> None:
    """Checks that replicated values are equal on all ranks; collective over the mesh.

    Raises:
        NumericsError: they are not.
    """
    differences = find_differences(run.engine)
    if differences:
        raise NumericsError(
            f"iteration {run.progress.step}: copies of the same values differ between ranks. {_listed(differences)}. "
            f"Nothing was saved; earlier checkpoints are intact: run the same command again. If it happens again, a "
            f"device or its memory is faulty: exclude the machine whose rank differs. --check-replicas-interval 0 "
            f"disables this check."
        )


def _listed(texts: list[str]) -> str:
    more = len(texts) - _DESCRIBED
    return "; ".join(texts[:_DESCRIBED]) + (f"; and {more} more" if more > 0 else "")
