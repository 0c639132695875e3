"""The record of this start of the run, by which later starts decide whether they may begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron import __version__, log
from megatron.config import RunConfig
from megatron.errors import MegatronError
from megatron.parallel.agreement import run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.train.callback import Callback
from megatron.train.restarts.breaker import decide, settings_digest
from megatron.train.restarts.history import RestartHistory
from megatron.train.restarts.restore import Start
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


def check_history(config: RunConfig, mesh: ParallelMesh, start: Start, history: RestartHistory) -> tuple[int, ...]:
    """Reads how earlier starts of the run ended, and opens the history of this one; collective over the mesh.

    Returns:
        the steps before which a batch is passed over, one entry for each batch.

    Raises:
        MegatronError: the run keeps ending at one step, and must not start without a change.
    """
    save, safety = config.saving.save, config.safety
    if save is None or config.evaluation.eval_only:
        if safety.resume_skip_poisoned and mesh.world.rank == 0:
            log.warning("--resume-skip-poisoned has no effect without --save, whose folder holds the run's history")
        return ()
    is_resume = start.saved is not None and not config.loading.finetune
    resumed_step = start.saved.record.progress.step if start.saved is not None and is_resume else 0

    def begin() -> list[Any]:
        settings = settings_digest(config.to_json())
        attempts = history.open(Path(save), start.identity.run_id)
        decided = decide(attempts, resumed_step, settings, safety)
        if decided.refusal is None:
            history.started(resumed_step, settings, decided.passes, __version__)
        return [decided.refusal, decided.passes]

    refusal, passes = run_on_first(mesh, begin)
    if refusal:
        raise MegatronError(refusal)
    return tuple(passes)
