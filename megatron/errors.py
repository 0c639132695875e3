"""Everything a user can meet: the typed errors and the exit codes they end the program with.

An error text says what is wrong with its values and flags, what must hold, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """How a program ended; schedulers act on these (75 means: queue the job again)."""

    DONE = 0
    USAGE = 64
    DATA = 65
    STORAGE = 74
    REQUEUE = 75
    HANG = 76
    NUMERICS = 77
    HUMAN = 78


class MegatronError(Exception):
    """Base of all errors that are shown as one text without a traceback."""

    exit_code = ExitCode.HUMAN


class ConfigError(MegatronError):
    """One or more flags, config-file entries or combinations of them that cannot be honoured.

    Args:
        problems: one sentence each; they are shown together.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class LaunchError(MegatronError):
    """The ranks that were started do not form the layout that was asked for."""

    exit_code = ExitCode.USAGE


class PeerLostError(MegatronError):
    """Another rank of the run is gone; what was saved is intact, so the job may simply be started again."""

    exit_code = ExitCode.REQUEUE


class DataError(MegatronError):
    """A corpus, token or index file that is damaged, missing or does not fit the run."""

    exit_code = ExitCode.DATA


class StorageError(MegatronError):
    """A write or read that the file system refused: path, need and reason are in the text."""

    exit_code = ExitCode.STORAGE


class CheckpointError(MegatronError):
    """A checkpoint that is damaged, missing or does not fit the run."""

    exit_code = ExitCode.STORAGE


class NumericsError(MegatronError):
    """Training produced values it cannot go on with."""

    exit_code = ExitCode.NUMERICS
