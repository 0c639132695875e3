"""The environment of a run: resolved flags, connected and watched ranks, and the locked --save folder."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron import __version__, device, log, process_exit
from megatron.checkpoint import CheckpointLock
from megatron.checkpoint.publish import sweep_at_start
from megatron.config import Machine, ReportConfig, RunConfig, RunRequest, TokenizerFacts, resolve
from megatron.config.objective.loss import MASKED
from megatron.config.objective.masking import SENTENCES
from megatron.data.build import token_file_prefixes
from megatron.data.datasets.masked.vocabulary import MaskedVocabulary
from megatron.data.formats.sidecar import check_tokenizer_fits
from megatron.errors import PeerLostError
from megatron.observe.report import check_packages
from megatron.observe.step_profiler import check_profile_ranks
from megatron.parallel.agreement import run_on_first
from megatron.parallel.joining import close_mesh, count_ranks, open_mesh, rendezvous
from megatron.parallel.kernels import agreed_kernels
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import is_lost_peer
from megatron.parallel.watch.limits import WatchLimits
from megatron.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron.train.restarts.history import RestartHistory
from megatron.train.run_data import show_notices, with_epochs
from megatron.train.signals import StopSignals
from megatron.train.start_up.engine_opening import check_patterns
from megatron.train.start_up.run_names import with_run_name
from megatron.train.stop import StopRules
from megatron.train.watchdog import Watch


@dataclass(frozen=True)
class RunEnvironment:
    """The environment of a run.

    Attributes:
        config: resolved, with the name of the run.
        lock: of the --save folder, if any.
        rules: the stop conditions.
        history: of the starts of the run; not open yet.
    """

    config: RunConfig
    mesh: ParallelMesh
    tokenizer: Tokenizer
    lock: CheckpointLock | None
    rules: StopRules
    history: RestartHistory
    watch: Watch

    def explaining_failures(self) -> contextlib.AbstractContextManager[None]:
        """Explains, records and prints an error that leaves the block, and notifies the other ranks, before enclosing
        contexts are closed, which may wait for them.
        """
        return _explaining_failures(self.history)


@contextlib.contextmanager
def open_environment(request: RunRequest, signals: StopSignals | None = None) -> Iterator[RunEnvironment]:
    """Resolves the flags, connects the ranks and locks the folder; an end of the run is recorded from then on.

    Args:
        signals: installed stop signals of the caller; installed here by default.

    Raises:
        MegatronError: a problem with the flags, the machine, the tokenizer or the folder.
    """
    started_at = time.monotonic()
    log.make_optional()
    _set_log_level(request.report)
    tokenizer = build_tokenizer(request.data)
    world_size = count_ranks(request.parallel)
    supported = (device.supports_fp16(), device.supports_bf16())
    machine = Machine(device.device_type(), world_size, *supported, supports_fp8=device.supports_fp8())
    config = resolve(request, machine, TokenizerFacts(tokenizer.vocab_size, tokenizer.eod_id, tokenizer.fingerprint))
    check_tokenizer_fits(token_file_prefixes(config.data), tokenizer)
    if config.loss.objective == MASKED:
        MaskedVocabulary.of(tokenizer, needs_all=config.masking.masked_samples == SENTENCES)
    check_patterns(config.finetuning, config.model)
    history = RestartHistory()
    with contextlib.ExitStack() as closing, _explaining_failures(history):
        if signals is None:
            signals = StopSignals()
            if config.stopping.exit_on_signal:
                closing.enter_context(signals.installed())
        watch = closing.enter_context(Watch())
        mesh = open_mesh(config.parallel)
        closing.callback(close_mesh, mesh)
        watch.open(mesh, rendezvous(), _time_limits(config))
        mesh = dataclasses.replace(mesh, kernels=agreed_kernels(config.requested_kernels, mesh))
        mesh = mesh if mesh.world.size == 1 else mesh.timed_by(device.Stopwatch())
        check_profile_ranks(config.watching, mesh.world.size)
        run_on_first(mesh, lambda: check_packages(config.report))
        config = dataclasses.replace(with_epochs(config, mesh, tokenizer), **_named_sections(config, mesh))
        show_notices(config.notices, mesh)
        save = None if config.saving.save is None else Path(config.saving.save)
        watch.report_folder = save
        lock = closing.enter_context(CheckpointLock(save, mesh)) if save else None
        if save is not None:
            sweep_at_start(save, mesh)
        rules = StopRules(config.stopping, signals, started_at=started_at, watches_file=mesh.world.rank == 0)
        yield RunEnvironment(config, mesh, tokenizer, lock, rules, history, watch)


@contextlib.contextmanager
def _explaining_failures(history: RestartHistory) -> Iterator[None]:
    with process_exit.showing_failures(), history.recording(), _explain_lost_peers():
        yield


@contextlib.contextmanager
def _explain_lost_peers() -> Iterator[None]:
    """Replaces the traceback caused by the loss of another rank with a one-sentence error."""
    try:
        yield
    except RuntimeError as failure:
        if not is_lost_peer(failure):
            raise
        # Without gloo's source location at the start, and its advice after the first sentence.
        reason = re.sub(r"^\[[^\]]*\]\s*", "", str(failure).strip().splitlines()[0]).partition(". ")[0]
        raise PeerLostError(
            f"another rank of this run exited or stopped responding, so this one cannot continue ({reason}). See that "
            f"rank's message for the cause; saved checkpoints are intact: run the same command again."
        ) from failure


def _time_limits(config: RunConfig) -> WatchLimits:
    # At start-up, which may build index files, the limit is the same as for a collective.
    hang_seconds = config.safety.hang_timeout_seconds
    return WatchLimits(hang_seconds, max(hang_seconds, 60.0 * config.parallel.distributed_timeout_minutes))


def _named_sections(config: RunConfig, mesh: ParallelMesh) -> dict[str, Any]:
    """The sections with folders that may contain the run's name, with that name filled in; collective over the mesh."""
    names = ("loading", "saving", "evaluation", "stopping", "report")
    return with_run_name({name: getattr(config, name) for name in names}, config.report.run_dir, mesh)


def _set_log_level(report: ReportConfig) -> None:
    if report.log_level:
        log.set_level(report.log_level)
    log.debug(f"megatron {__version__}")
