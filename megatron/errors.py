"""The errors a user may see, and the exit code each of them ends a program with.

An error text says what is wrong with its values and flags, what must hold, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """How a program ended; schedulers act on it (75: requeue the job)."""

    DONE = 0
    USAGE = 64
    DATA = 65
    STORAGE = 74
    REQUEUE = 75
    HANG = 76
    NUMERICS = 77
    HUMAN = 78


class MegatronError(Exception):
    """Base class of the errors that are shown as text, without a traceback."""

    exit_code = ExitCode.HUMAN


class ConfigError(MegatronError):
    """Flags, entries of a config file or combinations of them that cannot be used.

    Args:
        problems: one sentence each, all of them shown.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class LaunchError(MegatronError):
    """The processes that were started cannot form the run: launcher, machine, layout or another job prevents it."""

    exit_code = ExitCode.USAGE


class PeerLostError(MegatronError):
    """Another rank of the run ended; saved checkpoints are intact, so the job can be started again as it is."""

    exit_code = ExitCode.REQUEUE


class DataError(MegatronError):
    """A corpus, token or index file that is damaged, missing or does not fit the run."""

    exit_code = ExitCode.DATA


class StorageError(MegatronError):
    """A read or write that the file system refused; the text names the path and the reason."""

    exit_code = ExitCode.STORAGE


class CheckpointError(MegatronError):
    """A checkpoint that is damaged, missing or does not fit the run."""

    exit_code = ExitCode.STORAGE


class NumericsError(MegatronError):
    """Training produced values that it cannot continue from."""

    exit_code = ExitCode.NUMERICS
