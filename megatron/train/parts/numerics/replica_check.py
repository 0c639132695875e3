"""Compares copies of the same values between ranks (--check-replicas-interval)."""

from __future__ import annotations

from megatron.engine.replicas import find_differences
from megatron.errors import NumericsError
from megatron.train.part import Part, PartSetup
from megatron.train.run import Run
from megatron.train.steps import TrainedStep

_DESCRIBED = 5


class ReplicaCheck(Part):
    """Checks that all ranks hold the same values, at an interval and before they are saved.

    Args:
        interval: in steps; None to check before saves only.
    """

    def __init__(self, interval: int | None) -> None:
        self._interval = interval

    @classmethod
    def of(cls, setup: PartSetup) -> Part | None:
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
