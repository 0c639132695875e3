"""Python's garbage collection at the same steps on all ranks."""

from __future__ import annotations

import gc

from megatron.train.callback import Callback, CallbackSetup, Evaluation
from megatron.train.run import Run
from megatron.train.steps import TrainedStep


class GarbageCollection(Callback):
    """Runs the garbage collector at an interval and after evaluations, and disables it in between.

    Otherwise the collector would pause a different rank in each step, and all others would wait. Objects that exist
    when training starts are frozen.
    """

    def __init__(self, interval_steps: int) -> None:
        self._interval_steps = interval_steps
        self._was_enabled = False

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        interval_steps = setup.config.kernels.manual_gc_interval
        return cls(interval_steps) if interval_steps else None

    def opened(self, run: Run) -> None:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self, run: Run, step: TrainedStep) -> None:
        if run.progress.step % self._interval_steps == 0:
            gc.collect()

    def at_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        gc.collect()

    def close(self, run: Run, error: BaseException | None) -> None:
        if self._was_enabled:
            gc.enable()
        gc.unfreeze()
