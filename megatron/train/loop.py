"""The training loop: the order of steps, evaluation, saving and stopping."""

from __future__ import annotations

from megatron import log
from megatron.errors import DataError, ExitCode
from megatron.train.run import Run
from megatron.train.steps import EMPTY_ADVICE, StepReports, train_step
from megatron.train.stop import StopVerdict


def run_to_end(run: Run | None) -> ExitCode:
    """Trains or evaluates the run; None means that the kill switch prevented the start."""
    if run is None:
        return ExitCode.DONE
    return evaluate_only(run) if run.config.evaluation.eval_only else train(run)


def train(run: Run) -> ExitCode:
    """Trains until the planned samples are consumed or a stop condition holds, then saves.

    Raises:
        MegatronError: checkpoints can no longer be saved, the loss is not finite, or no step had one.
    """
    run.report.started(run.progress)
    steps = StepReports(run, run.stopping.steps_in_flight)
    with run.stopping.after_steps():
        verdict = train_steps(run, steps)
        if verdict is StopVerdict.FAILED_SAVE:
            run.saves.raise_failure(run)
        if verdict is StopVerdict.CONTINUE:
            steps.check_trained()
        run.saves.save(run, must_succeed=True)
        run.callbacks.trained(run)
    return finish(run) if verdict is StopVerdict.CONTINUE else stop(run, verdict)


def train_steps(run: Run, steps: StepReports) -> StopVerdict:
    """Trains, evaluates and saves step by step; returns why it stopped, CONTINUE if all samples are consumed."""
    evaluation, saving, is_save_due = run.config.evaluation, run.config.saving, False
    while not run.is_done:
        run.callbacks.before_step(run)
        consumed, step = run.progress.consumed_samples, train_step(run)
        run.progress = step.progress
        ends_epoch = run.completed_epoch(consumed)
        steps.add(step)
        run.callbacks.after_step(run, step)
        if run.is_due(evaluation.eval_interval) or (ends_epoch and evaluation.eval_each_epoch):
            steps.flush()
            run.evaluator.evaluate(run, f"iteration {run.progress.step}")
        is_save_due = is_save_due or run.is_due(saving.save_interval) or (ends_epoch and saving.save_each_epoch)
        # Not after a bad step: if the weights themselves are to blame, the last good checkpoint stays the newest.
        if is_save_due and not run.engine.gate.has_open_row:
            is_save_due = False
            steps.flush()
            run.saves.save(run)
        run.saves.note_outcome(run)
        verdict = run.stopping.decide(run.progress.step, has_failed_save=run.saves.failure is not None)
        # --exit-interval may name the last step, after which the run is finished, evaluations included.
        if verdict is not StopVerdict.CONTINUE and not (verdict is StopVerdict.INTERVAL and run.is_done):
            steps.flush()
            return verdict
    steps.flush()
    return StopVerdict.CONTINUE


def finish(run: Run) -> ExitCode:
    """Finishes a run that consumed all its samples: validation, unless its last epoch ended with one, and test."""
    if not (run.evaluator.has_validated(run.progress.step) and run.config.evaluation.eval_each_epoch):
        run.evaluator.evaluate(run, "the end of training for val data")
    run.evaluator.evaluate(run, "the end of training for test data", split="test")
    return ExitCode.DONE


def stop(run: Run, verdict: StopVerdict) -> ExitCode:
    """Ends a run early, at a step on which all ranks agreed."""
    run.report.flush()
    log.line(run.stopping.explain(run.progress.step))
    return verdict.exit_code


def evaluate_only(run: Run) -> ExitCode:
    """Evaluates the loaded weights without training.

    Raises:
        DataError: no evaluation has a loss.
    """
    losses = [
        loss
        for split in ("valid", "test")
        for loss in run.evaluator.evaluate(run, f"iteration {run.progress.step}", split=split).values()
    ]
    if losses and all(loss is None for loss in losses):
        raise DataError(f"nothing was evaluated: no token of the samples counts in the loss. {EMPTY_ADVICE}")
    return ExitCode.DONE
