"""Skipped steps, restarts, and hangs."""

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
            "--resume-skip-poisoned cannot be combined with --max-failed-starts 0, which disables the limit. Drop one "
            "of them."
        )
    if safety.skip_spikes is not None and safety.max_bad_steps == 0:
        yield (
            f"--skip-spikes {safety.skip_spikes:g} requires --max-bad-steps: with 0, the first skipped step ends the "
            "run. Set the number of consecutive steps that may be skipped, for example --max-bad-steps 5."
        )


@resolved_rule
def _hang_timeout(config: ResolvedSections, machine: Machine) -> Iterator[str]:
    minutes, seconds = config.parallel.distributed_timeout_minutes, config.safety.hang_timeout_seconds
    if seconds >= minutes * 60:
        yield (
            f"--hang-timeout-seconds {seconds:g} must be less than the {minutes * 60} seconds of "
            f"--distributed-timeout-minutes {minutes}, after which a collective fails without naming the hanging rank. "
            f"Use at most {minutes * 30}, or raise --distributed-timeout-minutes."
        )
