"""What ends a run before its planned steps, and what guards it against hangs, bad steps and endless restarts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection
from megatron.errors import ConfigError


@dataclass(frozen=True)
class StoppingConfig(ConfigSection):
    """Steps, times, signals and files that end a run."""

    exit_interval: int | None = flag(None, "save and exit when the step is a multiple of this", at_least=0)
    exit_duration_in_mins: int | None = flag(None, "save and exit after this many minutes", at_least=0)
    exit_on_signal: bool = flag(
        True, "on SIGTERM or SIGUSR1 save and exit with code 75", spelled=("--exit-signal-handler",)
    )
    kill_switch_path: str | None = flag(
        None, "save and exit as soon as this file exists", spelled=("--kill-switch-file",), path=PathUse.NEW_FILE
    )


@dataclass(frozen=True)
class SafetyRequest(ConfigSection):
    """Timeouts, comparisons and limits beyond which a run stops or passes over data, as they were asked for."""

    hang_timeout_seconds: float | None = flag(
        None,
        "seconds without progress on any rank after which the run ends with code 76, 0 for no limit; if unset, half of "
        "--distributed-timeout-minutes, and no limit for a single process",
        at_least=0,
        at_most=31_536_000,
    )
    check_replicas_interval: int | None = flag(
        None,
        "steps between comparisons of parameters that several ranks hold; before each save if unset, 0 for never",
        at_least=0,
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        False,
        "look for NaN and infinity in each rank's loss and gradients before they are summed, so that a bad step names "
        "the rank and the parameter; with ZeRO 3, in its loss. fp16 is left to its loss scaler",
    )
    max_bad_steps: int = flag(
        0,
        "consecutive steps with a NaN or infinite loss or gradient that are skipped; the next one ends the run",
        at_least=0,
    )
    skip_spikes: float | None = flag(
        None,
        "skip the update of a step whose loss or gradient norm is this many standard deviations above the recent mean",
        above=0,
    )
    max_failed_starts: int = flag(
        3, "failures at one step, with no new checkpoint in between, after which the run refuses to start", at_least=0
    )
    resume_skip_poisoned: bool = flag(
        False, "pass over a batch at which --max-failed-starts starts have ended in NaN, instead of refusing to start"
    )
    skip_train_iteration_range: tuple[str, ...] = flag(
        (),
        "ranges A-B of steps whose data is consumed without training on it; step A is then taken on the data of step "
        "B + 1, unless that is beyond --train-samples or --train-tokens",
        nargs="+",
    )

    @property
    def skip_ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges of steps to skip: 1-based, inclusive, sorted, with overlapping ranges merged."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(_read_range(text) for text in self.skip_train_iteration_range):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        return tuple(merged)

    def problems(self) -> Iterator[str]:
        for text in self.skip_train_iteration_range:
            try:
                _read_range(text)
            except ConfigError as failure:
                yield from failure.problems


@dataclass(frozen=True)
class SafetyConfig(SafetyRequest):
    """The timeouts, comparisons and limits of a run."""

    hang_timeout_seconds: float = flag(
        300.0,
        "seconds without progress on any rank after which the run ends with code 76; 0 for no limit",
        at_least=0,
        at_most=31_536_000,
    )


def _read_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal()) or not 1 <= int(first) <= int(last):
        raise ConfigError(
            f"--skip-train-iteration-range {text} is not a range of steps. Write A-B with 1 <= A <= B, for example 2-4."
        )
    return int(first), int(last)
