"""Reports this rank's phase to the watchdog."""

from __future__ import annotations

from megatron.parallel.messages import is_lost_peer
from megatron.parallel.watch.position import END
from megatron.train.callback import Callback, CallbackSetup
from megatron.train.run import Run
from megatron.train.watchdog import Watch


class Watching(Callback):
    """Reports the phases of the run to the watchdog."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        return cls(setup.watch)

    def opened(self, run: Run) -> None:
        run.engine.on_phase = self._watch.enter

    def before_step(self, run: Run) -> None:
        self._watch.enter("data", run.progress.step + 1)

    def close(self, run: Run, error: BaseException | None) -> None:
        if error is None or not is_lost_peer(error):  # else the verdict shows the phase of the loss
            self._watch.enter(END)
