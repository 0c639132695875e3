"""The training loop: the order of events in a run."""

from __future__ import annotations

from megatron import log
from megatron.errors import ExitCode
from megatron.train.callback import CallbackList
from megatron.train.run import Run
from megatron.train.steps import train_step
from megatron.train.stop import StopVerdict


def run_to_end(run: Run, callbacks: CallbackList) -> ExitCode:
    """Trains or evaluates the run.

    Raises:
        MegatronError: checkpoints cannot be saved, or the loss is not finite, or no step or evaluation had one.
    """
    if not run.config.evaluation.eval_only:
        return train(run, callbacks)
    callbacks.finished(run)
    return ExitCode.DONE


def train(run: Run, callbacks: CallbackList) -> ExitCode:
    """Trains until the planned samples are consumed or a stop condition holds."""
    run.report.started(run.progress)
    with run.stopping.after_steps():
        verdict = train_steps(run, callbacks)
        callbacks.trained(run)  # saves
    if verdict is StopVerdict.CONTINUE:
        callbacks.finished(run)  # evaluates
        return ExitCode.DONE
    run.report.flush()
    log.line(run.stopping.explain(run.progress.step))
    return verdict.exit_code


def train_steps(run: Run, callbacks: CallbackList) -> StopVerdict:
    """Trains until all samples are consumed (returns CONTINUE) or a stop condition holds (returns the verdict)."""
    while not run.is_done:
        callbacks.before_step(run)
        step = train_step(run)
        run.progress = step.progress
        callbacks.after_step(run, step)  # reports, then evaluates and saves when that is due
        verdict = run.stopping.decide(run.progress.step, is_last=run.is_done)
        if verdict is not StopVerdict.CONTINUE:
            return verdict
    return StopVerdict.CONTINUE
