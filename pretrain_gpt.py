"""Pretrains a GPT language model: flags in, checkpoints and metrics out.

Only `megatron.config` is imported before the flags have been checked, so `--help` and flag errors appear at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext

from megatron import log, process_exit
from megatron.config import NO_PROGRAM, Program
from megatron.config.parse import read_flags
from megatron.errors import ExitCode
from megatron.parallel.rank_start import begin_rank
from megatron.train.signals import StopSignals


def main(
    argv: Sequence[str] | None = None,
    program: Program = NO_PROGRAM,
) -> int:
    """Calls `begin_rank`, then `train`."""
    begin_rank()
    return train(sys.argv[1:] if argv is None else argv, program)


def train(argv: Sequence[str], program: Program = NO_PROGRAM) -> int:
    """Parses the flags, builds the run, trains it, and returns the exit code of `megatron.errors.ExitCode`.

    Args:
        argv: the trainer's command line; `begin_rank` must have been called.
        program: fixed settings, defaults and names of the calling program.
    """
    reading = read_flags(argv, program=program)
    if reading.unchecked().planning.plan_only:
        from trident.plan.command_line import show_plan

        return show_plan(argv, program)
    if reading.unchecked().planning.dry_run_ranks is not None:
        from trident.plan.command_line import checked_dry_run

        checked = checked_dry_run(argv, program)  # without torch
        from trident.plan.dry_run.simulation import print_dry_run

        return print_dry_run(*checked)
    signals = StopSignals()
    with signals.installed() if reading.unchecked().stopping.exit_on_signal else nullcontext():
        from megatron.train.preflight.checks import checked_request

        request = checked_request(reading)  # without torch
        log.set_activity("loading PyTorch and DeepSpeed")
        from megatron import device

        device.choose_accelerator()
        from megatron.train.build import open_run
        from megatron.train.loop import run_to_end
        from megatron.train.stop import kill_switch_is_on, kill_switch_message
        from trident.plan.out_of_memory import explained_memory

        if kill_switch_is_on(request.stopping.kill_switch_path):
            log.line(kill_switch_message(request.stopping.kill_switch_path))
            return ExitCode.DONE
        log.set_activity("building the network")
        with explained_memory(argv, request), open_run(request, signals, program.callbacks()) as (run, callbacks):
            return run_to_end(run, callbacks)


if __name__ == "__main__":
    process_exit.exit_with(main)
