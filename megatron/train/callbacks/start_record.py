"""The record of this start of the run, by which later starts decide whether they may begin."""

from __future__ import annotations

from megatron.train.callback import Callback
from megatron.train.restarts.history import RestartHistory
from megatron.train.run import Run


class StartRecord(Callback):
    """Writes the step of the run, and its regular end, into the history. Errors are recorded by its `recording`."""

    def __init__(self, history: RestartHistory) -> None:
        self._history = history
        self._has_begun = False

    def before_step(self, run: Run) -> None:
        if not self._has_begun:
            self._history.training_begins(run.progress.step + 1)
        self._has_begun = True
        self._history.at(run.progress.step + 1)

    def trained(self, run: Run) -> None:
        self._history.training_ends()

    def close(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            self._history.ended(None, run.stopping.verdict.exit_code)
