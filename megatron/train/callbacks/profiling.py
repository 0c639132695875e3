"""Traces of the steps of --profile."""

from __future__ import annotations

from pathlib import Path

from megatron import log
from megatron.config.schedule import planned_iterations
from megatron.observe.step_profiler import StepProfiler, check_profile_ranks, profile_notices
from megatron.train.callback import Callback, CallbackSetup
from megatron.train.run import Run
from megatron.train.steps import TrainedStep


class Profiling(Callback):
    """Profiles the selected steps on the selected ranks."""

    def __init__(self, setup: CallbackSetup) -> None:
        self._setup = setup
        self._profiler = StepProfiler.idle()

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        watching = setup.config.watching
        check_profile_ranks(watching, setup.mesh.world.size)
        return cls(setup) if watching.profiled_steps is not None else None

    def opened(self, run: Run) -> None:
        watching, progress = run.config.watching, run.progress
        folder = self._setup.watch.report_folder or Path()
        steps = planned_iterations(run.config.optim, progress.step, progress.consumed_samples)
        notices = profile_notices(
            watching, progress.step, progress.step if run.config.evaluation.eval_only else steps, folder
        )
        log.info("\n".join(notices))
        self._profiler = StepProfiler(watching, folder, run.mesh.world.rank, progress.step)

    def before_step(self, run: Run) -> None:
        self._profiler.before(run.progress.step + 1)

    def after_step(self, run: Run, step: TrainedStep) -> None:
        self._profiler.after(run.progress.step)

    def close(self, run: Run, error: BaseException | None) -> None:
        self._profiler.close()
