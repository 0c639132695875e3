"""All checks before the slow imports; their errors are reported together."""

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

# These start the same command on every rank, so that rank 0 reports problems with the command.
_SAME_COMMAND = ("torchrun", "deepspeed", "srun")


def checked_request(reading: RequestDraft, *, has_data: bool = True) -> RunRequest:
    """The request of flags and files, after all checks that are possible at this point.

    Errors that occur on every rank are printed by rank 0 only; the others exit with the same code.

    Args:
        has_data: False for a program that has yet to create the tokenizer and the token files.

    Raises:
        MegatronError: all problems; of the common type of all failures, else a ConfigError.
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
    """True if another rank certainly reports the same error: rank 0 or, for files, the first rank of the node."""
    if ranks.rank == 0 or ranks.launcher not in _SAME_COMMAND:
        return False
    # The other launchers end the remaining ranks after a failure, so that errors about files are not repeated.
    return not has_files or (ranks.launcher == "srun" and ranks.local_rank > 0)
