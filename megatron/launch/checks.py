"""Whether a program can run on so many ranks, found out before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType

from megatron.config import parse
from megatron.config.world import fit_layout, world_problems
from megatron.errors import ConfigError

# The programs whose command line is the trainer's, and what each of them decides itself.
_TRAINERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"pretrain_gpt.py": {}, "pretrain_prefix_lm.py": {"loss.objective": "prefix"}}
)


def check_program(words: Sequence[str], world_size: int) -> list[str]:
    """Checks a program's flags and its layout as the program itself would, if it is one whose flags are known.

    Returns:
        what to tell the user.

    Args:
        words: the program and its flags; at least one.

    Raises:
        ConfigError: all problems at once.
    """
    program = PurePath(words[0]).name
    if program not in _TRAINERS:
        return [f"{program} is not checked before its start: its flags are not known here"]
    request = parse(words[1:], prog=program, decided=_TRAINERS[program])
    request, notices = fit_layout(request, world_size)
    problems = world_problems(request, world_size)
    if problems:
        raise ConfigError(problems)
    tp, pp = request.parallel.tensor_model_parallel_size, request.parallel.pipeline_model_parallel_size
    return [*notices, f"{world_size} ranks: {tp} tensor x {pp} pipeline x {world_size // (tp * pp)} data"]
