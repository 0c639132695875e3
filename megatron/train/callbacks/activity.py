"""Reports of a run's activity: events, generated samples, heartbeats."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megatron.observe.activity import Activity
from megatron.parallel.mesh import ParallelMesh
from megatron.train.callback import Callback, CallbackSetup
from megatron.train.run import Run


class ActivityReports(Callback):
    """Writes activity files into the run folder, from rank 0."""

    def __init__(self, setup: CallbackSetup) -> None:
        self._setup = setup
        self._until_end = contextlib.ExitStack()

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        return cls(setup) if setup.mesh.world.rank == 0 else None

    def opened(self, run: Run) -> None:
        watch = self._setup.watch
        if watch.report_folder is not None:
            axes = [(axis.name, axis.size) for axis in run.mesh.sizes]
            self._activity.open(watch.report_folder, axes, watch.ranks, watch.poll_ranks)
        self._until_end.enter_context(self._activity.until_end(lambda: run.progress.step))

    def after_save(self, path: Path, mesh: ParallelMesh) -> None:
        self._activity.saved(path)

    def failed_save(self, run: Run, step: int, reason: str) -> None:
        self._activity.failed_save(step, reason)

    def close(self, run: Run, error: BaseException | None) -> None:
        if run.stopping.reason:
            self._activity.stopping(run.stopping.reason)
        if error is None:
            self._until_end.close()
        else:
            self._until_end.__exit__(type(error), error, error.__traceback__)

    @property
    def _activity(self) -> Activity:
        return self._setup.activity
