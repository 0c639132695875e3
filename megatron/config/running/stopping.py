"""What ends a run before its planned steps, with a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class StoppingConfig(ConfigSection):
    """Steps, times, signals and files that end a run."""

    exit_interval: int | None = flag(None, "save and exit when the step is a multiple of this", at_least=1)
    exit_duration_in_mins: int | None = flag(None, "save and exit after this many minutes", at_least=0)
    exit_on_signal: bool = flag(
        True, "on SIGTERM or SIGUSR1 save and exit with code 75", spelled=("--exit-signal-handler",)
    )
    kill_switch_path: str | None = flag(
        None, "save and exit as soon as this file exists", spelled=("--kill-switch-file",), path=PathUse.NEW_FILE
    )
