"""Constructs and connects the objects of a run; nothing else does."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron import __version__, device, log
from megatron.checkpoint import CheckpointLock
from megatron.checkpoint.publish import sweep_at_start
from megatron.checkpoint.record import Progress, Record
from megatron.config import (
    ControlConfig,
    Machine,
    OptimConfig,
    RunConfig,
    RunRequest,
    TokenizerFacts,
    check_resume,
    resolve,
    resolve_epochs,
)
from megatron.config.run import FILE, GIVEN
from megatron.config.schedule import is_done, planned_samples
from megatron.data.datasets.build import (
    SplitDatasets,
    build_split_datasets,
    describe,
    empty_splits,
    epoch_samples,
    taken_sources,
    token_file_prefixes,
)
from megatron.data.datasets.examples.options import ExampleOptions
from megatron.data.datasets.repetition import repetition_notices
from megatron.data.formats.sidecar import check_tokenizer_fits
from megatron.data.order.plan import DataPlan
from megatron.engine.ds_config import deepspeed_config
from megatron.engine.engine import Engine
from megatron.engine.freezing import EVERYTHING_IS_TRAINED, Freezing
from megatron.errors import LaunchError, MegatronError, PeerLostError
from megatron.model.interface.network import LayerKind
from megatron.model.networks import network_layers
from megatron.observe.console import argument_lines, size_line, trained_line
from megatron.observe.naming.reserving import with_run_name
from megatron.observe.profiling.step_profiler import check_profile_ranks
from megatron.observe.report import Destination, Report, check_packages, open_destinations
from megatron.observe.run_directory import open_run_directory, write_arguments
from megatron.observe.styles.choice import style_named
from megatron.observe.terminal.progress_bar import ProgressBar, has_colour, wants_bar
from megatron.parallel.agreement import run_on_all, run_on_first
from megatron.parallel.joining import close_mesh, count_ranks, open_mesh, rendezvous
from megatron.parallel.kernels import agreed_kernels
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_sum, is_lost_peer
from megatron.parallel.watch.limits import Limits
from megatron.parallel.watch.position import END
from megatron.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron.train.checkpoints import open_writer
from megatron.train.keeping import Keeping
from megatron.train.objectives import batch_options, build_objective, masked_options, step_settings, with_prefixes
from megatron.train.restarts.breaker import decide, settings_digest
from megatron.train.restarts.freezing import check_patterns, find_freezing
from megatron.train.restarts.history import History
from megatron.train.restore import Start, check_tokenizer, find_start, load_tensors
from megatron.train.run import Run
from megatron.train.signals import StopSignals
from megatron.train.start_up.facts import show_start, workload_of
from megatron.train.stop import StopRules, kill_switch_is_on, kill_switch_message
from megatron.train.tasks.completing import open_prompts
from megatron.train.tasks.opening import open_tasks
from megatron.train.teachers.opening import begin_distillation
from megatron.train.watchdog import Watch


@contextlib.contextmanager
def open_run(request: RunRequest, signals: StopSignals | None = None) -> Iterator[Run | None]:
    """Builds a run, from its process groups to its progress, and tears it down afterwards.

    Yields None if the kill switch is on before anything has started.

    Args:
        signals: where stop signals are noted, if the caller has installed that; else it is done here.

    Raises:
        MegatronError: anything that is wrong with the flags, the machine, the data or the checkpoint.
    """
    started_at = time.monotonic()
    if kill_switch_is_on(request.control.kill_switch_path):
        log.line(kill_switch_message(request.control.kill_switch_path))
        yield None
        return
    log.make_optional()
    _set_log_level(request.control)
    tokenizer = build_tokenizer(request.data)
    world_size = count_ranks(request.parallel)
    machine = Machine(device.device_type(), world_size, device.supports_fp16(), device.supports_bf16())
    config = resolve(request, machine, TokenizerFacts(tokenizer.vocab_size, tokenizer.eod_id, tokenizer.fingerprint))
    check_tokenizer_fits(token_file_prefixes(config.data), tokenizer)
    check_patterns(config.finetuning, config.model)
    history = History()
    with contextlib.ExitStack() as closing, log.showing_failures(), history.recording(), _explain_lost_peers():
        if signals is None:
            signals = StopSignals()
            if config.control.exit_on_signal:
                closing.enter_context(signals.installed())
        watch = closing.enter_context(Watch())
        mesh = open_mesh(config.parallel)
        closing.callback(close_mesh, mesh)
        mesh = dataclasses.replace(mesh, kernels=agreed_kernels(config.requested_kernels, mesh))
        mesh = mesh if mesh.world.size == 1 else mesh.timed_by(device.Stopwatch())
        check_profile_ranks(config.watching, mesh.world.size)
        run_on_first(mesh, lambda: check_packages(config.control))
        config = dataclasses.replace(_with_epochs(config, mesh, tokenizer), control=with_run_name(config.control, mesh))
        _show_notices(config.notices, mesh)
        save = config.control.save
        watch.open(mesh, rendezvous(), _time_limits(config))
        watch.report_folder = _path(save)
        lock = closing.enter_context(CheckpointLock(Path(save), mesh)) if save else None
        if save is not None:
            sweep_at_start(Path(save), mesh)
        run = _build(config, mesh, tokenizer, lock, signals, started_at, history, watch)
        run.after_commit = run.activity.before(run.after_commit)
        if run.writer is not None:
            run.writer.after_commit = run.after_commit
            closing.enter_context(run.writer).beat = lambda: watch.beat("save")
        run.watch, run.engine.on_phase = watch, watch.enter
        if mesh.world.rank == 0 and watch.report_folder is not None:
            run.activity.open(watch.report_folder, [(axis.name, axis.size) for axis in mesh.sizes], watch.ranks)
        closing.callback(run.close)
        closing.callback(run.profiler.close)
        closing.callback(run.report.close)
        closing.callback(watch.enter, END)
        closing.enter_context(run.activity.until_end(lambda: run.progress.step))
        yield run


def _with_epochs(config: RunConfig, mesh: ParallelMesh, tokenizer: Tokenizer) -> RunConfig:
    """Gives a run of --epochs its length, for which the training data are counted."""
    if config.finetuning.epochs is None or config.control.eval_only:
        return config
    data, length, seed = config.data, config.data.seq_length, config.random.seed
    examples, masked = ExampleOptions.of(config.finetuning, config.loss, data), masked_options(config)
    count = run_on_first(mesh, lambda: epoch_samples(data, length, seed, tokenizer, examples, masked=masked))
    return resolve_epochs(config, count)


@contextlib.contextmanager
def _explain_lost_peers() -> Iterator[None]:
    """Replaces the traceback that a dead rank causes on other ranks by a one-sentence error."""
    try:
        yield
    except RuntimeError as failure:
        if not is_lost_peer(failure):
            raise
        # gloo puts the place in its source code first, and advice about bugs after the first sentence
        reason = re.sub(r"^\[[^\]]*\]\s*", "", str(failure).strip().splitlines()[0]).partition(". ")[0]
        raise PeerLostError(
            f"another rank of this run ended or stopped answering, so this one cannot continue ({reason}). See that "
            f"rank's own message for the cause; saved checkpoints are intact: run the same command again."
        ) from failure


def _build(
    config: RunConfig,
    mesh: ParallelMesh,
    tokenizer: Tokenizer,
    lock: CheckpointLock | None,
    signals: StopSignals,
    started_at: float,
    history: History,
    watch: Watch,
) -> Run:
    start = find_start(config.control, mesh, _path(config.saving.save_secondary))
    config, saved = dataclasses.replace(config, control=start.control), start.saved
    passes = check_history(config, mesh, start, history)
    if saved is not None:
        check_tokenizer(config.control, saved.record, tokenizer)
        known = len(config.notices)
        config = check_resume(saved.record.config, config)
        _show_notices(config.notices[known:], mesh)
    tasks = open_tasks(config.control.eval_tasks, tokenizer, config.model, mesh)
    prompts = open_prompts(config.control, tokenizer, config.model, mesh)
    engine, sizes = _open_engine(config, mesh, saved.record if saved else None)
    writer = open_writer(config.control, config.saving, engine, lock, is_required=config.was_given("saving.async_save"))
    record, progress = load_tensors(config.control, engine, saved)
    is_resume = record is not None and not config.control.finetune
    if is_resume and not config.control.eval_only:
        warn_if_done(config.optim, progress)
    resumed_step = progress.step if is_resume else None
    stored_plan = record.data_plan if record is not None and is_resume else None
    datasets, plan = _open_data(config, mesh, tokenizer, progress, stored_plan, passes)
    names = plan.train.source_names() if config.control.log_per_source_loss and plan.train else ()
    engine.objective = build_objective(config, mesh, source_count=len(names))
    student = begin_distillation(engine, config, tokenizer, progress.step)
    report = _open_report(config, mesh, sizes[1], names, watch, plan, is_resume=record is not None or start.is_restart)
    profiler = show_start(config, engine, sizes, datasets, plan, progress, watch, is_loaded=record is not None)
    return Run(
        config=config,
        mesh=mesh,
        tokenizer=tokenizer,
        engine=engine,
        datasets=with_prefixes(datasets, config, tokenizer),
        plan=plan,
        options=batch_options(config, tokenizer),
        report=report,
        rules=StopRules(config.control, signals, started_at=started_at, watches_file=mesh.world.rank == 0),
        lock=lock,
        progress=progress,
        steps_in_flight=1 if mesh.device.type == "cuda" else 0,
        saved_step=resumed_step,
        writer=writer,
        after_commit=Keeping(config.saving, resumed_step, lambda: watch.beat("save")),
        identity=start.identity,
        history=history,
        passes=passes,
        student=student,
        passed_batches=tuple(record.passed_batches) if record is not None and is_resume else (),
        tasks=tasks,
        profiler=profiler,
        prompts=prompts,
    )


def _open_engine(config: RunConfig, mesh: ParallelMesh, record: Record | None) -> tuple[Engine, tuple[int, int, int]]:
    """Builds the engine and shows the size of its network; see `parameter_counts`."""
    freezing = find_freezing(config.finetuning, config.control, network_layers(config.model, mesh), mesh, record)
    engine = build_engine(config, mesh, freezing)
    check_layers(engine, config.model.num_layers)
    sizes = parameter_counts(engine)
    log.info(size_line(mesh.tp.rank, mesh.pp.rank, *sizes[:2]))
    if freezing.frozen:
        log.info(trained_line(sizes[2], sizes[0]))
    if config.loss.reweight_loss_based_on_position_frequency:
        log.info("Using loss reweighting")
    return engine, sizes


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def check_history(config: RunConfig, mesh: ParallelMesh, start: Start, history: History) -> tuple[int, ...]:
    """Reads how earlier starts of the run ended, and opens the history of this one; collective over the mesh.

    Returns:
        the steps before which a batch is passed over, one entry for each batch.

    Raises:
        MegatronError: the run keeps ending at one step, and must not start without a change.
    """
    control, safety = config.control, config.safety
    if control.save is None or control.eval_only:
        if safety.resume_skip_poisoned and mesh.world.rank == 0:
            log.warning("--resume-skip-poisoned has no effect without --save, whose folder holds the run's history")
        return ()
    is_resume = start.saved is not None and not control.finetune
    resumed_step = start.saved.record.progress.step if start.saved is not None and is_resume else 0

    def begin() -> list[Any]:
        settings = settings_digest(config.to_json())
        attempts = history.open(Path(str(control.save)), start.identity.run_id)
        decided = decide(attempts, resumed_step, settings, safety)
        if decided.refusal is None:
            history.started(resumed_step, settings, decided.passes, __version__)
        return [decided.refusal, decided.passes]

    refusal, passes = run_on_first(mesh, begin)
    if refusal:
        raise MegatronError(refusal)
    return tuple(passes)


def warn_if_done(optim: OptimConfig, progress: Progress) -> None:
    """Warns that a resumed run has nothing left to train."""
    if is_done(optim, progress.step, progress.consumed_samples, (), progress.consumed_tokens):
        log.info(
            f"warning: the checkpoint is at iteration {progress.step} ({progress.consumed_samples} samples) and the "
            f"run ends at iteration {optim.train_iters}: nothing is left to train. Raise --train-iters, "
            f"--train-samples or --train-tokens to continue."
        )


def build_engine(config: RunConfig, mesh: ParallelMesh, freezing: Freezing = EVERYTHING_IS_TRAINED) -> Engine:
    """The training engine of a resolved configuration."""
    return Engine(
        network_layers(config.model, mesh),
        build_objective(config, mesh),
        config.optim,
        config.precision,
        mesh,
        deepspeed_config(config),
        step_settings(config),
        config.random.seed,
        config.safety.skip_spikes,
        freezing,
    )


def _time_limits(config: RunConfig) -> Limits:
    """When a run hangs. Start-up, with its indices to build, may take as long as a collective may."""
    hang_seconds = config.safety.hang_timeout_seconds
    return Limits(hang_seconds, max(hang_seconds, 60.0 * config.parallel.distributed_timeout_minutes))


def _show_notices(notices: Sequence[str], mesh: ParallelMesh) -> None:
    for notice in notices if mesh.world.rank == 0 else ():
        log.warning(notice)


def _open_data(
    config: RunConfig,
    mesh: ParallelMesh,
    tokenizer: Tokenizer,
    progress: Progress,
    stored: DataPlan | None,
    passes: Sequence[int],
) -> tuple[SplitDatasets, DataPlan]:
    """Opens the datasets; one process per node first writes missing index files, then the others read them."""
    consumed = progress.consumed_samples, progress.consumed_tokens
    train, valid, test = planned_samples(config.optim, config.control, progress.step, *consumed)
    train += sum(step > progress.step for step in passes) * config.optim.global_batch_size
    samples = (0 if config.control.eval_only else train, valid, test)

    def build(build_indices: bool) -> tuple[SplitDatasets, DataPlan]:
        length, seed, consumed = config.data.seq_length, config.random.seed, progress.consumed_samples
        options = ExampleOptions.of(config.finetuning, config.loss, config.data)
        return build_split_datasets(
            config.data,
            length,
            seed,
            samples,
            stored,
            build_indices,
            consumed,
            tokenizer,
            options,
            masked_options(config),
        )

    built: list[tuple[SplitDatasets, DataPlan]] = []

    def build_on_first_of_node() -> None:
        if mesh.local_rank == 0:
            built.append(build(True))

    run_on_all(mesh, build_on_first_of_node)
    datasets, plan = built[0] if built else build(False)
    for text in describe(datasets, plan):
        log.info(text)
    asked = {config.provenance.get(f"control.{name}") for name in ("eval_interval", "eval_iters")}
    is_evaluated = not asked.isdisjoint((GIVEN, FILE))
    notices = empty_splits(config.data, plan, is_evaluated=is_evaluated) if valid != 0 else []
    if plan.train is not None and datasets.train is not None and config.finetuning.epochs is None:
        notices += repetition_notices(
            taken_sources(plan.train, datasets.train, plan.sequence_length), plan.sequence_length
        )
    _show_notices(notices, mesh)
    return datasets, plan


def _open_report(
    config: RunConfig,
    mesh: ParallelMesh,
    parameters_without_embeddings: int,
    source_names: Sequence[str],
    watch: Watch,
    plan: DataPlan,
    *,
    is_resume: bool,
) -> Report:
    """Opens the report: the last rank prints the console lines, as in upstream; rank 0 writes all files."""
    workload = workload_of(config, mesh, parameters_without_embeddings)
    arguments = config.flat()

    destinations: list[Destination] = []

    def open_files() -> list[Any]:
        opened = open_run_directory(
            config.control.run_dir,
            config.to_json(),
            name="bert" if config.model.bidirectional else "gpt",
            is_resume=is_resume,
            files=config.control.run_files,
            program_flags=config.control.program_flags,
        )
        log.copy_to(opened.log_path)
        if config.control.log_path:
            write_arguments(config.control.log_path, argument_lines(arguments))
        destinations.extend(open_destinations(config.control, workload, opened, is_resume=is_resume))
        has_bar = wants_bar(config.watching, config.control)
        return [str(opened.path), has_bar, has_bar and log.is_terminal("stdout")]

    folder, has_bar, hides_lines = run_on_first(mesh, open_files)
    watch.report_folder = Path(folder)
    if has_bar:
        log.open_status(with_lines=hides_lines)
    return Report(
        config.control,
        config.optim,
        workload,
        style_named(config.control.log_style),
        samples_per_epoch=plan.pass_samples or None,
        shows_loss_scale=config.precision.fp16,
        arguments=arguments,
        destinations=destinations,
        source_names=source_names,
        bar=ProgressBar(has_colour=has_colour()) if has_bar and mesh.world.rank == 0 else None,
        hides_lines=hides_lines,
    )


def parameter_counts(engine: Engine) -> tuple[int, int, int]:
    """Parameter counts of the whole network, of the network without embeddings, and of what is trained; collective over
    the mesh.
    """
    counts = torch.zeros(3, dtype=torch.float64, device=engine.mesh.device)
    for spec, numel, is_trained in engine.counted_parameters():
        counts[0] += numel
        counts[1] += 0 if spec.kind is LayerKind.EMBEDDING else numel
        counts[2] += numel if is_trained else 0
    total, without_embeddings, trained = map(int, all_reduce_sum(counts, engine.mesh.model).tolist())
    return total, without_embeddings, trained


def check_layers(engine: Engine, num_layers: int) -> None:
    """Checks the number of transformer blocks that all stages built; collective over the pipeline.

    Raises:
        LaunchError: it is not `num_layers`.
    """
    blocks = sum(spec.kind is LayerKind.BLOCK for spec, _ in engine.stack.named_layers())
    built = torch.tensor([blocks], dtype=torch.int64, device=engine.mesh.device)
    total = int(all_reduce_sum(built, engine.mesh.pp))
    if total != num_layers:
        raise LaunchError(
            f"the {engine.mesh.pp.size} pipeline stages hold {total} transformer layers, not the {num_layers} of "
            "--num-layers. This is a bug in the partitioning; use another --pipeline-model-parallel-size and report it."
        )


def _set_log_level(control: ControlConfig) -> None:
    if control.log_level:
        log.set_level(control.log_level)
    log.debug(f"megatron {__version__}")
