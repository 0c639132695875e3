"""One exit code for a run of many processes."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.errors import ExitCode

_FIRST_SIGNAL_CODE = 128  # what a shell, ssh and srun make of an end by a signal


def combined_code(codes: Iterable[int]) -> int:
    """The exit code that says why a run ended, from those of its processes in the order in which they ended.

    A code that names a cause wins, the earliest first: 77 of the rank that found a NaN over the 75 of those that lost
    it. If there is none and a process says that the run can be started again (75), as the others do when one is killed,
    so does the run. Else it is 128 plus the signal that ended the first.

    Args:
        codes: negative for a signal, as `subprocess` has it.
    """
    failed = [_FIRST_SIGNAL_CODE - code if code < 0 else code for code in codes if code != ExitCode.DONE]
    causes = [code for code in failed if code < _FIRST_SIGNAL_CODE and code != ExitCode.REQUEUE]
    if causes:
        return causes[0]
    if ExitCode.REQUEUE in failed:
        return ExitCode.REQUEUE
    return failed[0] if failed else ExitCode.DONE
