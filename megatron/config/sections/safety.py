"""Early exits, and safeguards against hangs, bad steps and endless restarts."""

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

    exit_interval: int | None = flag(None, "save and exit after a step divisible by this", at_least=0)
    exit_duration_in_mins: int | None = flag(None, "save and exit after this many minutes", at_least=0)
    exit_on_signal: bool = flag(
        True, "on SIGTERM or SIGUSR1 save and exit with code 75", spelled=("--exit-signal-handler",)
    )
    kill_switch_path: str | None = flag(
        None, "save and exit when this file exists", spelled=("--kill-switch-file",), path=PathUse.NEW_FILE
    )


@dataclass(frozen=True)
class SafetyRequest(ConfigSection):
    """Timeouts, consistency checks, and limits beyond which a run stops or skips data, as requested."""

    hang_timeout_seconds: float | None = flag(
        None,
        "exit with code 76 after this many seconds without progress on a rank; 0 disables it. If unset, half of "
        "--distributed-timeout-minutes, disabled for a single process",
        at_least=0,
        at_most=31_536_000,
    )
    check_replicas_interval: int | None = flag(
        None,
        "steps between checks that replicated parameters are equal on all ranks; before each save if unset, 0 for "
        "never",
        at_least=0,
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        False,
        "check each rank's loss and gradients for NaN and Inf before the reduction and report the rank and the "
        "parameter; with ZeRO 3 only the loss. No effect with fp16, which has a loss scaler",
    )
    max_bad_steps: int = flag(
        0,
        "consecutive steps with a NaN or infinite loss or gradient to skip; one more ends the run",
        at_least=0,
    )
    skip_spikes: float | None = flag(
        None,
        "skip the update of a step whose loss or gradient norm exceeds the recent mean by this many standard "
        "deviations",
        above=0,
    )
    max_failed_starts: int = flag(
        3, "failures at the same step, without a new checkpoint, after which the run refuses to restart", at_least=0
    )
    resume_skip_poisoned: bool = flag(
        False, "skip a batch once --max-failed-starts attempts have ended in NaN there, instead of refusing to restart"
    )
    skip_train_iteration_range: tuple[str, ...] = flag(
        (),
        "ranges A-B of steps whose data is skipped; step A then trains on the data of step B + 1, unless it is beyond "
        "--train-samples or --train-tokens",
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
    """The resolved timeouts, consistency checks and limits of a run."""

    hang_timeout_seconds: float = flag(
        300.0,
        "exit with code 76 after this many seconds without progress on a rank; 0 disables it",
        at_least=0,
        at_most=31_536_000,
    )


def _read_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal()) or not 1 <= int(first) <= int(last):
        raise ConfigError(
            f"--skip-train-iteration-range {text} is not a range of steps. Expected A-B with 1 <= A <= B, for example "
            "2-4."
        )
    return int(first), int(last)
