"""Profiles a window of steps on selected ranks: traces for chrome://tracing and Perfetto, and tables of operations.

Steps outside the window are not slowed down.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import profiler

from megatron import device, log
from megatron.config.sections.reporting import WatchingConfig
from megatron.errors import ConfigError

FOLDER = "profile"
_ROWS = 40


class StepProfiler:
    """Profiles the steps of `WatchingConfig.profiled_steps`, if this rank is selected.

    Args:
        watching: the steps, ranks and level of detail.
        folder: the run folder; traces are written to a subfolder.
        rank: this rank.
        done: steps completed before this start.
    """

    def __init__(self, watching: WatchingConfig, folder: Path, rank: int, done: int = 0) -> None:
        window = watching.profiled_steps
        self._first, self._last = window if window is not None and rank in watching.profile_ranks else (0, 0)
        self._is_full = watching.profile_is_full
        self._folder = folder / FOLDER
        self._rank = rank
        self._warmup_steps = int(self._first - 1 > done)
        self._first = max(self._first, done + 1)
        self._profile: profiler.profile | None = None
        self._taken = 0

    @classmethod
    def idle(cls) -> StepProfiler:
        return cls(WatchingConfig(), Path(), 0)

    def before(self, step: int) -> None:
        """Starts the profiler before the window, with a warm-up step if possible: the first profiled step is slower."""
        if self._last and step == self._first - self._warmup_steps and step <= self._last:
            with _without_advice():
                self._profile = profiler.profile(
                    activities=list(profiler.supported_activities()) if device.device_type() == "cuda" else None,
                    schedule=profiler.schedule(
                        wait=0, warmup=self._warmup_steps, active=self._last - self._first + 1, repeat=1
                    ),
                    on_trace_ready=self._write,
                    record_shapes=self._is_full,
                    profile_memory=self._is_full,
                    with_stack=self._is_full,
                )
                self._profile.start()

    def after(self, step: int) -> None:
        """Writes the trace after the last step of the window."""
        if self._profile is None:
            return
        self._taken = step
        self._profile.step()
        if step == self._last:
            self.close()

    def close(self) -> None:
        """Writes the trace of a window that the run has not completed."""
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.stop()

    def _write(self, profile: profiler.profile) -> None:
        name = f"rank_{self._rank}_steps_{self._first}_to_{self._taken}"
        trace = self._folder / f"{name}.json"
        by = "self_device_time_total" if device.device_type() == "cuda" else "self_cpu_time_total"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(trace))
            table = profile.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=60)
            trace.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")
        except (OSError, RuntimeError) as failure:
            log.warning(f"the profile {trace} cannot be written: {failure}. The run continues.")
            return
        log.info(f"profile of steps {self._first} to {self._taken}: {trace} (and .txt: operations by time)")


def profile_notices(watching: WatchingConfig, done: int, train_iterations: int, folder: Path) -> list[str]:
    """Notices about the profile, logged before training starts.

    Args:
        done: completed steps.
        train_iterations: the last step of the run.
    """
    if watching.profiled_steps is None:
        return []
    first, last = watching.profiled_steps
    if last <= done or first > train_iterations:
        return [
            f"warning: --profile selects steps {first} to {last}, but this run trains steps {done + 1} to "
            f"{train_iterations}: none is profiled. Use --profile-step-start {done + 1} or a later one."
        ]
    ranks = ", ".join(map(str, watching.profile_ranks))
    return [f"steps {first} to {last} are profiled on rank {ranks}, into {folder / FOLDER}"]


def check_profile_ranks(watching: WatchingConfig, world_size: int) -> None:
    """Checks that the ranks to profile exist.

    Raises:
        ConfigError: one does not.
    """
    for rank in watching.profile_ranks if watching.profile is not None else ():
        if rank >= world_size:
            raise ConfigError(
                f"--profile-ranks {rank} does not exist: this run has {world_size} ranks, 0 to {world_size - 1}."
            )


@contextmanager
def _without_advice() -> Iterator[None]:
    with warnings.catch_warnings():  # of torch, that the profile of a first step has no warm-up
        warnings.simplefilter("ignore")
        yield
