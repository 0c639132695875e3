"""Steps that are skipped, restarts, and hangs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.machine import Machine
from megatron.config.rules.rule import resolved_rule, run_rule
from megatron.config.run_sections import ResolvedSections, RunSections


@run_rule
def _skipped_steps(run: RunSections) -> Iterator[str]:
    safety = run.safety
    if safety.resume_skip_poisoned and safety.max_failed_starts == 0:
        yield (
            "--resume-skip-poisoned passes over a batch after --max-failed-starts ends, and --max-failed-starts 0 "
            "sets no number. Drop one of the two."
        )
    if safety.skip_spikes is not None and safety.max_bad_steps == 0:
        yield (
            f"--skip-spikes {safety.skip_spikes:g} skips steps, and with --max-bad-steps 0 the first skipped step "
            "ends the run. Give the number of consecutive steps that may be skipped, for example --max-bad-steps 5."
        )


@resolved_rule
def _hang_timeout(config: ResolvedSections, machine: Machine) -> Iterator[str]:
    """A run ends before a collective times out, whose error names no cause."""
    minutes, seconds = config.parallel.distributed_timeout_minutes, config.safety.hang_timeout_seconds
    if seconds >= minutes * 60:
        yield (
            f"--hang-timeout-seconds {seconds:g} is not less than the {minutes * 60} seconds of "
            f"--distributed-timeout-minutes {minutes}, after which a collective fails without naming the rank that "
            f"hangs. Use at most {minutes * 30}, or raise --distributed-timeout-minutes."
        )
