"""The training loop: the order of steps, evaluation, saving and stopping."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.config.schedule import learning_rate, weight_decay
from megatron.device import Elapsed, peak_memory_bytes
from megatron.engine.deepspeed_setup import TRANSFER
from megatron.errors import ExitCode
from megatron.observe.metrics import StepOutcome
from megatron.observe.speed.waits import Waits
from megatron.train.checkpoints import hear_of_save, raise_failed_save, save_run
from megatron.train.evaluation import evaluate
from megatron.train.numerics import check_numbers, check_replicas
from megatron.train.run import Run
from megatron.train.stop import Verdict


@dataclass(frozen=True)
class TrainedStep:
    """A trained step; its metrics may still be on the device.

    Attributes:
        progress: after the step.
        learning_rate: the learning rate that was used.
        seconds: wall time of the step.
        data_seconds: of these, until its batch was read.
        messages: what its messages took; None with one rank, which sends none.
        sample_tokens: tokens of each sample; in a curriculum they grow.
    """

    progress: Progress
    result: StepOutcome
    learning_rate: float
    seconds: float
    data_seconds: float
    messages: Elapsed | None
    sample_tokens: int


def run_to_end(run: Run | None) -> ExitCode:
    """Trains or evaluates the run; None means that the kill switch prevented the start."""
    if run is None:
        return ExitCode.DONE
    code = evaluate_only(run) if run.config.control.eval_only else train(run)
    run.history.ended(None, code)
    return code


def train(run: Run) -> ExitCode:
    """Trains until the planned samples are consumed or a stop condition holds, then saves.

    Raises:
        MegatronError: checkpoints can no longer be saved, or the loss is not finite.
    """
    run.report.started(run.progress)
    with run.rules.signals.steps_follow(run.watch), run.history.training(run.progress.step + 1):
        verdict = train_steps(run)
        if verdict is Verdict.FAILED_SAVE:
            raise_failed_save(run)
        run.watch.enter("save")
        save_run(run, must_succeed=True)
    return finish(run) if verdict is Verdict.CONTINUE else stop(run, verdict)


def train_steps(run: Run) -> Verdict:
    """Trains, evaluates and saves step by step; returns why it stopped, CONTINUE if all samples are consumed."""
    trained: deque[TrainedStep] = deque()
    is_save_due = False
    while not run.is_done:
        run.skip_data_ranges()
        run.end_distillation()
        run.history.at(run.progress.step + 1)
        started_at = time.monotonic()
        optim, consumed, length = run.config.optim, run.progress.consumed_samples, run.next_length
        rate = learning_rate(optim, consumed, run.progress.consumed_tokens)
        decay = weight_decay(optim, consumed, run.progress.consumed_tokens)
        run.watch.enter("data", run.progress.step + 1)
        batches = run.train_batches()
        data_seconds = time.monotonic() - started_at
        run.take_messages()  # those of what came before the step
        run.profiler.before(run.progress.step + 1)
        run.engine.expect_length(length)
        step = run.engine.train_batch(batches, rate, decay)
        tokens = step.sample_count * length
        run.progress = run.progress.after(step.sample_count, tokens, step.skipped, step.bad_in_a_row > 0)
        ends_epoch = run.completed_epoch(consumed)
        seconds = time.monotonic() - started_at
        trained.append(TrainedStep(run.progress, step, rate, seconds, data_seconds, run.take_messages(), length))
        run.profiler.after(run.progress.step)
        report_steps(run, trained, keep=run.steps_in_flight)
        if run.is_due(run.config.safety.check_replicas_interval):
            check_replicas(run)
        control = run.config.control
        if run.is_due(control.eval_interval) or (ends_epoch and control.eval_each_epoch):
            report_steps(run, trained)
            evaluate(run, f"iteration {run.progress.step}")
        is_save_due = is_save_due or run.is_due(control.save_interval) or (ends_epoch and control.save_each_epoch)
        # Not after a bad step: if the weights themselves are to blame, the last good checkpoint stays the newest.
        if is_save_due and step.bad_in_a_row == 0:
            is_save_due = False
            report_steps(run, trained)
            run.watch.enter("save")
            save_run(run)
        hear_of_save(run)
        verdict = run.should_stop()
        if verdict is not Verdict.CONTINUE:
            run.rules.signals.settle()
            report_steps(run, trained)
            return verdict
    report_steps(run, trained)
    return Verdict.CONTINUE


def report_steps(run: Run, trained: deque[TrainedStep], keep: int = 0) -> None:
    """Reports and checks trained steps in order, except the last `keep`, whose metrics may still be on the device.

    Raises:
        NumericsError: see `check_numbers`.
    """
    while len(trained) > keep:
        step = trained.popleft()
        waits = waits_of(run, step)
        run.report.step(step.progress, step.result, step.learning_rate, step.seconds, waits, step.sample_tokens)
        check_numbers(run, step.progress, step.result)


def waits_of(run: Run, step: TrainedStep) -> Waits:
    """What a step waited for; its metrics have arrived, so nothing waits for a GPU any more."""
    messages = step.messages
    return Waits(
        data_seconds=step.data_seconds,
        communication_seconds=None if messages is None else messages.seconds(),
        transfer_seconds=None if messages is None or run.mesh.pp.size == 1 else messages.seconds(TRANSFER),
        memory_bytes=peak_memory_bytes(),
    )


def finish(run: Run) -> ExitCode:
    """Finishes a run that consumed all its samples: validation, unless its last epoch ended with one, and test."""
    is_evaluated = run.validation is not None and run.validation[0] == run.progress.step
    if not (is_evaluated and run.config.control.eval_each_epoch):
        evaluate(run, "the end of training for val data")
    evaluate(run, "the end of training for test data", split="test")
    return ExitCode.DONE


def stop(run: Run, verdict: Verdict) -> ExitCode:
    """Ends a run early, at a step on which all ranks agreed."""
    run.report.flush()
    message = run.rules.message(verdict, run.progress.step)
    log.line(message)
    run.activity.stopping(message)
    return verdict.exit_code


def evaluate_only(run: Run) -> ExitCode:
    """Evaluates the loaded weights without training."""
    evaluate(run, f"iteration {run.progress.step}")
    evaluate(run, f"iteration {run.progress.step}", split="test")
    return ExitCode.DONE
