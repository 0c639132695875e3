"""Compares two runs step by step, for instance a resumed run with the one that was killed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from megatron.observe.metrics_file import check_run, read_records, read_steps

Steps = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Pair:
    """One step of two runs.

    Attributes:
        iteration: the step.
        losses: losses of both runs in nats per token; NaN if no token counts.
        gradient_norms: gradient norms of both before clipping; NaN if unknown.
        same_schedule: learning rate, consumed samples and consumed tokens are exactly equal.
    """

    iteration: int
    losses: tuple[float, float]
    gradient_norms: tuple[float, float]
    same_schedule: bool

    def agrees(self, tolerance: float, norm_tolerance: float) -> bool:
        """True if the runs agree at this step within relative tolerances."""
        return (
            self.same_schedule
            and relative_difference(*self.losses) <= tolerance
            and relative_difference(*self.gradient_norms) <= norm_tolerance
        )


def relative_difference(first: float, second: float) -> float:
    """|first - second| over the larger magnitude; 0 for two NaN, infinity if only one is finite."""
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second))


def pair_up(first: Steps, second: Steps, after: int = 0) -> list[Pair]:
    """The steps after `after` that both runs logged, in order.

    Raises:
        DataError: the runs have no such step in common, or one of them misses a step in between.
    """
    last = min(max(first, default=0), max(second, default=0))
    expected = sorted(step for step in {*first, *second} if after < step <= last)
    if not expected:
        raise DataError(
            f"The runs have no step after {after} in common: the first has {_range(first)}, the second "
            f"{_range(second)}. Lower --after, or compare other runs."
        )
    missing = [step for step in expected if step not in first or step not in second]
    if missing:
        which = "first" if missing[0] not in first else "second"
        raise DataError(
            f"Step {missing[0]} is in one run only: the {which} run has "
            f"{_range(first if which == 'first' else second)} without it. Both runs must have logged every step after "
            f"{after} (--after)."
        )
    return [_pair(step, first[step], second[step]) for step in expected]


def read_pair(paths: Sequence[str | Path]) -> tuple[Steps, Steps]:
    """Reads the steps of two runs or, for a single resumed run, the steps that it logged twice.

    Raises:
        DataError: a file is missing or unreadable, or a single run logged no step twice.
    """
    for path in paths:
        check_run(path)
    if len(paths) > 1:
        return read_steps(paths[0]), read_steps(paths[1])
    records = [record for record in read_records(paths[0]) if record["kind"] == "step"]
    earlier = {int(record["iteration"]): record for record in reversed(records)}
    later = {int(record["iteration"]): record for record in records}
    repeated = [step for step in sorted(later) if earlier[step] is not later[step]]
    if not repeated:
        raise DataError(
            f"{paths[0]} logged no step twice ({_range(later)}), so it cannot be compared. A single run must "
            f"have repeated steps after a resume in the same folder (--run-dir). To compare two runs, give a second "
            f"one: compare_runs.py RUN OTHER_RUN."
        )
    return {step: earlier[step] for step in repeated}, {step: later[step] for step in repeated}


def table(pairs: Sequence[Pair]) -> list[str]:
    """Formats a heading, and one line per step."""
    heading = (
        f"{'step':>8} | {'loss':>22} | {'loss again':>22} | {'difference':>10} | "
        f"{'grad norm':>12} | {'again':>12} | {'difference':>10} | rate and samples"
    )
    lines = [heading, "-" * len(heading)]
    for pair in pairs:
        lines.append(
            f"{pair.iteration:8d} | {pair.losses[0]!r:>22} | {pair.losses[1]!r:>22} | "
            f"{relative_difference(*pair.losses):10.1e} | {pair.gradient_norms[0]:12.6g} | "
            f"{pair.gradient_norms[1]:12.6g} | {relative_difference(*pair.gradient_norms):10.1e} | "
            f"{'equal' if pair.same_schedule else 'DIFFERENT'}"
        )
    return lines


def verdict(pairs: Sequence[Pair], tolerance: float, norm_tolerance: float) -> tuple[bool, str]:
    """Returns True if all steps agree, and a sentence with the result."""
    differing = [pair.iteration for pair in pairs if not pair.agrees(tolerance, norm_tolerance)]
    worst = max(relative_difference(*pair.losses) for pair in pairs)
    steps = f"steps {pairs[0].iteration} to {pairs[-1].iteration}"
    bound = f"largest relative difference of a loss {worst:.1e}, tolerance {tolerance:.1e}"
    if differing:
        return False, f"DIFFERENT: {len(differing)} of {len(pairs)} ({steps}), first at step {differing[0]}; {bound}"
    exact = sum(pair.losses[0] == pair.losses[1] for pair in pairs)
    return True, f"EQUAL: all {len(pairs)} {steps}, {exact} of them bit for bit; {bound}"


def _pair(step: int, first: Mapping[str, Any], second: Mapping[str, Any]) -> Pair:
    return Pair(
        step,
        (_number(first["lm_loss"]), _number(second["lm_loss"])),
        (_number(first["gradient_norm"]), _number(second["gradient_norm"])),
        all(first[name] == second[name] for name in ("learning_rate", "consumed_samples", "consumed_tokens")),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _range(steps: Steps) -> str:
    return f"steps {min(steps)} to {max(steps)}" if steps else "no steps"
