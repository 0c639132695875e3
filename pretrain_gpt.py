"""Pretrains a GPT language model: flags in, checkpoints and metrics out.

Only `megatron.config` is imported before the flags have been checked, so `--help` and flag errors appear at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from megatron import log
from megatron.config.parse import read_flags
from megatron.parallel.rank_start import begin_rank
from megatron.train.signals import StopSignals


def main(
    argv: Sequence[str] | None = None,
    decided: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """Begins this rank, then `train`: for programs whose command line is the trainer's."""
    begin_rank()
    return train(sys.argv[1:] if argv is None else argv, decided, defaults)


def train(
    argv: Sequence[str], decided: Mapping[str, str] | None = None, defaults: Mapping[str, Any] | None = None
) -> int:
    """Parses the flags, builds the run, trains it, and returns the exit code of `megatron.errors.ExitCode`.

    Args:
        argv: the trainer's command line, of a process that `begin_rank` has prepared.
        decided: what a program for one objective gives itself, see `megatron.config.parse.read_flags`.
        defaults: what a program prefers to the trainer's own defaults, see there as well.
    """
    reading = read_flags(argv, decided=decided, defaults=defaults)
    signals = StopSignals()
    with signals.installed() if reading.unchecked().control.exit_on_signal else nullcontext():
        from megatron.train.preflight.checks import checked_request

        request = checked_request(reading)  # without torch
        from megatron import device

        device.choose_accelerator()
        from megatron.train.build import open_run
        from megatron.train.loop import run_to_end

        with open_run(request, signals) as run:
            return run_to_end(run)


if __name__ == "__main__":
    log.exit_with(main)
