"""Curriculum learning by sequence length: the tokens of each sample that a step trains on.

Source: DeepSpeed 0.14 `runtime/data_pipeline/curriculum_scheduler.py`, `CurriculumScheduler`; the difficulty of a step:
bigscience-workshop/Megatron-DeepSpeed `megatron/training.py`, `train`.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection

FIXED_LINEAR, FIXED_ROOT, FIXED_DISCRETE = "fixed_linear", "fixed_root", "fixed_discrete"
_NEVER = 2**53  # a step that no run reaches


@dataclass(frozen=True)
class CurriculumFields(ConfigSection):
    """Truncates samples to a length that grows over the run; the rest of each sample is not used."""

    curriculum_learning: bool = flag(
        False, "curriculum learning: truncate samples to a sequence length that grows over the run"
    )
    curriculum_schedule: str = flag(
        FIXED_LINEAR,
        "growth from --curriculum-min-length to --curriculum-max-length over --curriculum-steps: linear, or with a "
        "root of the steps; fixed_discrete uses --curriculum-lengths",
        choices=(FIXED_LINEAR, FIXED_ROOT, FIXED_DISCRETE),
    )
    curriculum_min_length: int | None = flag(None, "sequence length at the first step", at_least=1)
    curriculum_max_length: int | None = flag(
        None, "sequence length at the end of the curriculum; --seq-length if unset", at_least=1
    )
    curriculum_steps: int | None = flag(None, "number of curriculum steps", at_least=1)
    curriculum_length_step: int = flag(8, "sequence lengths are rounded down to a multiple of this", at_least=1)
    curriculum_root_degree: float = flag(
        2.0, "root degree of --curriculum-schedule fixed_root; 2 for the square root", at_least=1
    )
    curriculum_lengths: tuple[int, ...] = flag(
        (), "sequence lengths of fixed_discrete, in ascending order", nargs="+", at_least=1
    )
    curriculum_max_steps: tuple[int, ...] = flag(
        (), "last step of each of --curriculum-lengths, except the final one", nargs="+", at_least=1
    )

    @property
    def curriculum_length_flags(self) -> dict[str, tuple[int, ...]]:
        """The truncated lengths, or the number they are multiples of, by flag."""
        if not self.curriculum_learning:
            return {}
        if self.curriculum_schedule == FIXED_DISCRETE:
            return {"--curriculum-lengths": self.curriculum_lengths}
        end = {} if self.curriculum_max_length is None else {"--curriculum-max-length": (self.curriculum_max_length,)}
        return {"--curriculum-length-step": (self.curriculum_length_step,), **end}

    def length_at(self, step: int, whole: int) -> int:
        """Tokens of each sample in step number `step`, counted from 1; `whole` is the full length."""
        if not self.curriculum_learning:
            return whole
        if self.curriculum_schedule == FIXED_DISCRETE:
            return self.curriculum_lengths[bisect.bisect_left(self.curriculum_max_steps, step)]
        least, most = self.curriculum_min_length or 1, self.curriculum_max_length or whole
        degree = 1.0 if self.curriculum_schedule == FIXED_LINEAR else self.curriculum_root_degree
        share = (float(step) / (self.curriculum_steps or 1)) ** (1.0 / degree)
        length = math.floor(share * (most - least) + least)
        return min(most, length - length % self.curriculum_length_step)

    def last_step_with_length(self, step: int, whole: int) -> int | None:
        """The last step with the length of step number `step`; None if the length stays."""
        length = self.length_at(step, whole)
        if length == self.length_at(_NEVER, whole):
            return None
        beyond = step + 1
        while self.length_at(beyond, whole) == length:
            beyond *= 2
        steps = range(step, beyond)
        return steps[bisect.bisect_right(steps, length, key=lambda number: self.length_at(number, whole)) - 1]
