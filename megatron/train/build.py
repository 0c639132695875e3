"""Constructs and connects the objects of a run; nothing else does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from megatron.checkpoint.background_writer import BackgroundWriter
from megatron.config import RunRequest, check_resume
from megatron.config.rules.experts import balancing_notices
from megatron.train.callback import Callback, CallbackList, CallbackSetup
from megatron.train.callbacks.evaluator import Evaluator
from megatron.train.callbacks.saving import Saving, open_writer
from megatron.train.callbacks.start_record import StartRecord
from megatron.train.callbacks.step_reports import StepReports
from megatron.train.callbacks.table import make_callbacks
from megatron.train.objectives import build_objective
from megatron.train.restarts.restart_policy import check_history
from megatron.train.restarts.restore import check_tokenizer, find_start, load_tensors, warn_if_done
from megatron.train.run import Run
from megatron.train.run_data import open_data, show_notices
from megatron.train.signals import StopSignals
from megatron.train.start_up.engine_opening import open_engine
from megatron.train.start_up.environment import RunEnvironment, open_environment
from megatron.train.start_up.report_opening import open_report
from megatron.train.start_up.summary import show_start
from megatron.train.stop import Stopping


@contextlib.contextmanager
def open_run(
    request: RunRequest, signals: StopSignals | None = None, callbacks: Sequence[type[Callback]] = ()
) -> Iterator[tuple[Run, CallbackList]]:
    """Builds a run with its process groups and callbacks, and tears it down afterwards.

    Args:
        signals: installed stop signals of the caller; installed here by default.
        callbacks: classes in addition to those enabled by flags.

    Raises:
        MegatronError: an invalid flag, or a problem with the machine, the data or the checkpoint.
    """
    with (
        open_environment(request, signals) as environment,
        contextlib.ExitStack() as closing,
        environment.explaining_failures(),
    ):
        run, writer, all_callbacks = _build(environment, callbacks)
        if writer is not None:
            closing.enter_context(writer)
        closing.callback(run.stopping.close)
        closing.callback(run.data.close)
        closing.callback(run.report.close)
        closing.enter_context(all_callbacks.open(run))
        yield run, all_callbacks


def _build(
    environment: RunEnvironment, more_callbacks: Sequence[type[Callback]]
) -> tuple[Run, BackgroundWriter | None, CallbackList]:
    config, mesh, tokenizer, watch = environment.config, environment.mesh, environment.tokenizer, environment.watch
    start = find_start(config, mesh)
    config, saved = start.config, start.saved
    batch_skips = check_history(config, mesh, start, environment.history)
    if saved is not None:
        check_tokenizer(config.loading, saved.record, tokenizer)
        shown = len(config.notices)
        config = check_resume(saved.record.config, config)
        show_notices(config.notices[shown:], mesh)
    else:
        is_by_choice = config.was_given("model.moe_aux_loss_scope")
        show_notices([*balancing_notices(config.model, is_by_choice=is_by_choice)], mesh)
    requested = make_callbacks(CallbackSetup(config, mesh, tokenizer, watch, batch_skips), more_callbacks)
    engine, sizes = open_engine(config, mesh, saved.record if saved else None)
    writer = open_writer(config, engine, environment.lock)
    loaded, progress = load_tensors(config, engine, saved)
    resumed = None if config.loading.finetune else loaded
    if resumed is not None and not config.evaluation.eval_only:
        warn_if_done(config.optim, progress)
    data = open_data(config, mesh, tokenizer, progress, None if resumed is None else resumed.data_plan, batch_skips)
    engine.objective = build_objective(config, mesh, sources=data.source_names)
    requested.restore(engine, progress, resumed)
    is_resume = loaded is not None or start.is_restart
    report, folder = open_report(config, mesh, sizes[1], data.plan, is_resume=is_resume)
    watch.report_folder = folder
    show_start(config, engine, sizes, data, progress, folder, is_loaded=loaded is not None)
    run = Run(config, mesh, engine, data, report, Stopping(environment.rules, mesh, watch), watch, progress)
    reports = StepReports()
    evaluator = Evaluator(requested, reports)
    saved_step = None if resumed is None else progress.step
    saving = Saving(start.identity, requested, reports, evaluator, environment.lock, writer, saved_step)
    callbacks = CallbackList((reports, *requested, evaluator, saving, StartRecord(environment.history)))
    return run, writer, callbacks
