"""The launcher's variables, and whether the processes they announce fit the machine, the layout and the batch sizes."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Collection

from megatron.config.flags.fields import Unset
from megatron.config.resolve import Machine, dtype_problems, machine_problems
from megatron.config.run import RunRequest, fields_of
from megatron.config.world import world_problems
from megatron.cuda_driver import why_no_cuda
from megatron.errors import ConfigError, LaunchError, MegatronError
from megatron.parallel.launchers import Ranks
from megatron.parallel.rank_start import launched_ranks
from megatron.secret_text import masked

# The sections that decide about layout, batch sizes and timeouts.
_SECTIONS = ("model", "parallel", "optim", "safety")


def launch_failures(
    request: RunRequest, wrong: Collection[str], *, is_sound: bool
) -> tuple[Ranks | None, list[MegatronError]]:
    """The ranks that were started, None if their variables contradict each other, and what is wrong with them.

    Args:
        wrong: fields of the request that hold no usable value; with fields of the layout among them, nothing is
            compared.
        is_sound: no rule between the fields of the request is broken.
    """
    reason = why_no_cuda()
    device = "cpu" if reason else "cuda"  # without a reason torch will tell
    machine = Machine(device, 1, supports_fp16=not reason, supports_bf16=True, device_reason=reason)
    problems = list(dtype_problems(request.precision, machine))
    try:
        ranks = launched_ranks(request.parallel.local_rank)
    except LaunchError as failure:
        return None, [failure, *map(ConfigError, problems)]
    if _has_layout(request, wrong):
        machine = dataclasses.replace(machine, world_size=ranks.world_size)
        if is_sound:
            problems += machine_problems(request, machine)
        elif not request.parallel.elastic:
            problems += world_problems(request, machine.world_size)
        if ranks.launcher == "none" and request.parallel.model_parallel_size > 1 and not request.parallel.elastic:
            problems.append(f"Type: {_launched(request.parallel.model_parallel_size)}")
    return ranks, [*map(ConfigError, problems)]


def _launched(processes: int) -> str:
    """The command line of this process, under a launcher."""
    return f"torchrun --nproc-per-node {processes} {shlex.join(map(masked, sys.argv))}"


def _has_layout(request: RunRequest, wrong: Collection[str]) -> bool:
    """Whether all that decides about the layout is known."""
    fields = [
        (field.name, getattr(getattr(request, section), field.name))
        for section in _SECTIONS
        for field in fields_of(type(getattr(request, section)))
    ]
    return not any(name in wrong or value is Unset.COMPUTED for name, value in fields)
