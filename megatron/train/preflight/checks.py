"""All checks before the slow imports, whose refusals are shown together."""

from __future__ import annotations

from megatron.config.parse import RequestDraft
from megatron.config.run_config import RunRequest
from megatron.errors import ConfigError, MegatronError, joined
from megatron.parallel.launchers import Ranks
from megatron.train.preflight.inputs import (
    file_failures,
    package_failures,
    place_failures,
    source_failures,
    tokenizer_failures,
)
from megatron.train.preflight.machine import launch_failures, memory_problems
from megatron.train.preflight.pipelines import schedule_problems

# These start the same command on every rank, so that rank 0 shows what is wrong with the command.
_SAME_COMMAND = ("torchrun", "deepspeed", "srun")


def checked_request(reading: RequestDraft, *, has_data: bool = True) -> RunRequest:
    """The request that flags and files make, if nothing known at this point rules it out.

    Of errors that occur on every rank, only rank 0 shows the text; the others end with the same code.

    Args:
        has_data: False for a program that has yet to make the tokenizer and the token files.

    Raises:
        MegatronError: everything that is wrong; of the type that all failures share, else a ConfigError.
    """
    request, wrong = reading.unchecked(), reading.wrong
    ranks, launch = launch_failures(request, wrong, is_sound=not reading.problems)
    of_files: list[MegatronError] = [*file_failures(request), *place_failures(request)]
    if has_data:
        of_files = [*source_failures(request, wrong), *tokenizer_failures(request, wrong), *of_files]
    failures = [*map(ConfigError, reading.problems), *launch, *package_failures(request, wrong), *of_files]
    if not reading.problems and not launch and ranks is not None:
        failures += map(ConfigError, [*memory_problems(request, ranks), *schedule_problems(request, ranks.world_size)])
    if failures:
        failure = joined(failures)
        failure.is_on_all_ranks = ranks is not None and _is_shown_by_another(ranks, has_files=bool(of_files))
        raise failure
    return reading.request()


def _is_shown_by_another(ranks: Ranks, *, has_files: bool) -> bool:
    """Whether another rank certainly shows the same error: rank 0 or, where files matter, the first rank of the node.

    Launchers that end the other ranks of a failed one take care of files themselves.
    """
    if ranks.rank == 0 or ranks.launcher not in _SAME_COMMAND:
        return False
    return not has_files or (ranks.launcher == "srun" and ranks.local_rank > 0)
