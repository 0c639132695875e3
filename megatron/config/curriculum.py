"""The arithmetic of a curriculum by sequence length: how many tokens of each sample a step trains on.

Source: DeepSpeed 0.14 `runtime/data_pipeline/curriculum_scheduler.py`, `CurriculumScheduler`; and which step has which
difficulty: bigscience-workshop/Megatron-DeepSpeed `megatron/training.py`, `train`.
"""

from __future__ import annotations

import bisect
import math

from megatron.config.sections.curriculum import FIXED_DISCRETE, FIXED_LINEAR
from megatron.config.sections.optim import OptimConfig

_NEVER = 2**53  # a step that no run reaches


def length_of_step(optim: OptimConfig, step: int) -> int:
    """Tokens of each sample in step number `step`, counted from 1."""
    if not optim.curriculum_learning:
        return optim.tokens_per_sample
    if optim.curriculum_schedule == FIXED_DISCRETE:
        return optim.curriculum_lengths[bisect.bisect_left(optim.curriculum_max_steps, step)]
    least, most = optim.curriculum_min_length or 1, optim.curriculum_max_length or optim.tokens_per_sample
    degree = 1.0 if optim.curriculum_schedule == FIXED_LINEAR else optim.curriculum_root_degree
    share = (float(step) / (optim.curriculum_steps or 1)) ** (1.0 / degree)
    length = math.floor(share * (most - least) + least)
    return min(most, length - length % optim.curriculum_length_step)


def last_step_of_length(optim: OptimConfig, step: int) -> int | None:
    """The last step with the length of step number `step`; None if the length stays."""
    length = length_of_step(optim, step)
    if length == length_of_step(optim, _NEVER):
        return None
    beyond = step + 1
    while length_of_step(optim, beyond) == length:
        beyond *= 2
    steps = range(step, beyond)
    return steps[bisect.bisect_right(steps, length, key=lambda number: length_of_step(optim, number)) - 1]
