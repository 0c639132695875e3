"""The record of this start of the run in the restart history."""

from __future__ import annotations

from megatron.train.callback import Callback
from megatron.train.restarts.history import RestartHistory
from megatron.train.run import Run


class StartRecord(Callback):
    """Records the current step and a regular end. Errors are recorded by `RestartHistory.recording`."""

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
