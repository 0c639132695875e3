"""The batches on which starts of the run ended in NaN (--resume-skip-poisoned)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.checkpoint.record import Progress, Record
from megatron.engine.engine import Engine
from megatron.train.part import Part, PartSetup
from megatron.train.run import Run


class PoisonedBatches(Part):
    """Passes over the batches; as with a range that is skipped, the step is taken next, on the batch after them.

    Args:
        steps: the steps before which a batch is passed over; a step may be listed several times.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = tuple(steps)
        self._passed: list[Mapping[str, int]] = []

    @classmethod
    def of(cls, setup: PartSetup) -> Part | None:
        return cls(setup.passes)

    def restore(self, engine: Engine, progress: Progress, record: Record | None) -> None:
        self._passed = [] if record is None else list(record.passed_batches)

    def before_step(self, run: Run) -> None:
        step, passed = run.progress.step + 1, []
        for _ in range(self._steps.count(step)):
            first = run.progress.consumed_samples
            run.pass_over(1)
            passed.append({"step": step, "first_sample": first, "last_sample": run.progress.consumed_samples - 1})
        for batch in passed:
            self._passed.append(batch)
            run.report.passed(run.progress, batch, len(self._passed))

    def state(self, run: Run) -> Mapping[str, Any]:
        return {"passed_batches": tuple(self._passed)}
