"""Callbacks that guard the numerics of a run: batches that are skipped, spikes, and replicas that must stay equal."""

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
    """Skips the data of the ranges without training on them."""

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
    """Skips the batches; as with a range that is skipped, the step is then taken on the batch after them.

    Args:
        steps: the steps before which a batch is passed over; a step may be listed several times.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = tuple(steps)
        self._passed: list[Mapping[str, int]] = []

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        return cls(setup.passes)

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        self._passed = [] if record is None else list(record.passed_batches)

    def before_step(self, run: Run) -> None:
        step, passed = run.progress.step + 1, []
        for _ in range(self._steps.count(step)):
            first = run.progress.consumed_samples
            run.skip_batches(1)
            passed.append({"step": step, "first_sample": first, "last_sample": run.progress.consumed_samples - 1})
        for batch in passed:
            self._passed.append(batch)
            run.report.passed(run.progress, batch, len(self._passed))

    def state(self, run: Run) -> Mapping[str, Any]:
        return {"passed_batches": tuple(self._passed)}


class Spikes(Callback):
    """Makes a resumed run skip the steps that an uninterrupted run would skip."""

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        if record is not None:
            engine.gate.restore(record.recent)

    def state(self, run: Run) -> Mapping[str, Any]:
        return {"recent": run.engine.gate.to_json()}


_DESCRIBED = 5


class ReplicaCheck(Callback):
    """Checks that all ranks hold the same values, at an interval and before they are saved.

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
        if not run.is_due(self._interval):  # if it is due, they were checked after this step already
            check_replicas(run)


def check_replicas(run: Run) -> None:
    """Checks that all ranks hold the same values wherever they hold copies; collective over the mesh.

    Raises:
        NumericsError: they do not.
    """
    differences = find_differences(run.engine)
    if differences:
        raise NumericsError(
            f"iteration {run.progress.step}: copies of the same values differ between ranks. {_listed(differences)}. "
            f"They were not saved; earlier checkpoints are intact: run the same command again. If it happens again, a "
            f"device or its memory is faulty: exclude the machine whose rank differs. --check-replicas-interval 0 "
            f"turns this check off."
        )


def _listed(texts: list[str]) -> str:
    left = len(texts) - _DESCRIBED
    return "; ".join(texts[:_DESCRIBED]) + (f"; and {left} more" if left > 0 else "")
