"""A curriculum by sequence length: how much of each sample the steps train on.

Source: DeepSpeed 0.14 `runtime/data_pipeline/curriculum_scheduler.py`, `CurriculumScheduler`; and which step has which
difficulty: bigscience-workshop/Megatron-DeepSpeed `megatron/training.py`, `train`.
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
    """Steps train on the first tokens of each sample: few at first, then more, finally all; the rest is not used."""

    curriculum_learning: bool = flag(
        False, "train on the first tokens of each sample, more of them from step to step; the rest is not used"
    )
    curriculum_schedule: str = flag(
        FIXED_LINEAR,
        "how the length grows from --curriculum-min-length to --curriculum-max-length over --curriculum-steps: in "
        "proportion to the steps, or to a root of them; or fixed_discrete: --curriculum-lengths",
        choices=(FIXED_LINEAR, FIXED_ROOT, FIXED_DISCRETE),
    )
    curriculum_min_length: int | None = flag(None, "tokens of a sample at the first step", at_least=1)
    curriculum_max_length: int | None = flag(
        None, "tokens of a sample at the end of the curriculum; --seq-length if unset", at_least=1
    )
    curriculum_steps: int | None = flag(None, "steps of the curriculum", at_least=1)
    curriculum_length_step: int = flag(8, "lengths are multiples of this number", at_least=1)
    curriculum_root_degree: float = flag(
        2.0, "degree of the root of --curriculum-schedule fixed_root; 2 is the square root", at_least=1
    )
    curriculum_lengths: tuple[int, ...] = flag(
        (), "tokens of a sample in each part of the run, in ascending order", nargs="+", at_least=1
    )
    curriculum_max_steps: tuple[int, ...] = flag(
        (), "the last step of each of these parts, except the last one, which has no end", nargs="+", at_least=1
    )

    @property
    def curriculum_length_flags(self) -> dict[str, tuple[int, ...]]:
        """The lengths that samples will have besides their whole length, or what they are multiples of, by flag."""
        if not self.curriculum_learning:
            return {}
        if self.curriculum_schedule == FIXED_DISCRETE:
            return {"--curriculum-lengths": self.curriculum_lengths}
        end = {} if self.curriculum_max_length is None else {"--curriculum-max-length": (self.curriculum_max_length,)}
        return {"--curriculum-length-step": (self.curriculum_length_step,), **end}

    def length_at(self, step: int, whole: int) -> int:
        """Tokens of each sample in step number `step`, counted from 1, of the `whole` that a sample has."""
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
