"""The errors shown to users, and their exit codes.

A message states the problem with values and flags, the requirement, and the remedy.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple


class ExitCode(IntEnum):
    """Exit codes of programs; schedulers act on them (75: requeue the job)."""

    DONE = 0
    USAGE = 64
    DATA = 65
    STORAGE = 74
    REQUEUE = 75
    HANG = 76
    NUMERICS = 77
    HUMAN = 78


class MegatronError(Exception):
    """Base class of errors that are printed without a traceback.

    Attributes:
        is_on_all_ranks: every rank has the same error, so that only one needs to print it.
    """

    exit_code = ExitCode.HUMAN
    is_on_all_ranks = False


_MOST_LETTERS = 4000


def _shortened(sentence: str) -> str:
    """Removes the middle of a sentence that is too long."""
    half = _MOST_LETTERS // 2
    return sentence if len(sentence) <= _MOST_LETTERS else f"{sentence[:half]} [...] {sentence[-half:]}"


def printable(value: object, letters: int = 200, *, quoted: bool = True) -> str:
    """A value from a file, shortened and escaped for a message.

    Strings are quoted, so that they cannot be mistaken for a part of the message.

    Args:
        quoted: if false, omit the quotes of a string, for example around a name or path.
    """
    if isinstance(value, str):
        shown = repr(value[: letters + 1])
        shown = shown if quoted else shown[1:-1]
    elif isinstance(value, (Mapping, list, tuple, set)):
        short = reprlib.Repr()
        short.maxstring = short.maxother = 80
        shown = short.repr(value)
    else:
        shown = repr(value)
    return shown if len(shown) <= letters else shown[: letters - 3] + "..."


class ConfigError(MegatronError):
    """Invalid flags, entries of a config file, or combinations of them.

    Args:
        problems: one sentence each; all are printed, long ones shortened.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [_shortened(one) for one in ([problems] if isinstance(problems, str) else problems)]
        super().__init__("\n".join(self.problems))


class LaunchError(MegatronError):
    """The launched processes cannot form the run, because of launcher, machine, layout or another job."""

    exit_code = ExitCode.USAGE


class PeerLostError(MegatronError):
    """Another rank of the run exited; saved checkpoints are intact, so the same command can be restarted."""

    exit_code = ExitCode.REQUEUE


class HangError(MegatronError):
    """A rank of the run is stopped or stuck; saved checkpoints are intact, so the same command can be restarted."""

    exit_code = ExitCode.HANG


class DataError(MegatronError):
    """A corpus, token or index file is damaged, missing or does not match the run."""

    exit_code = ExitCode.DATA


class StorageError(MegatronError):
    """The file system refused a read or write; the message names the path and the reason."""

    exit_code = ExitCode.STORAGE


class TooManyFilesError(StorageError):
    """A file that could not be opened because too many are, in this process or on this machine."""


class CheckpointError(MegatronError):
    """A checkpoint is damaged, missing or does not match the run."""

    exit_code = ExitCode.STORAGE


class DamagedError(CheckpointError):
    """The bytes of a checkpoint differ from those written; an older one may be valid."""


class ConversionError(MegatronError):
    """A model of another program cannot be converted; names the field, tensor or file."""

    exit_code = ExitCode.DATA


class OutOfMemoryError(MegatronError):
    """Out of device or host memory."""


class NumericsError(MegatronError):
    """Training cannot continue because of invalid values.

    Args:
        step: the step that produced them; None if unknown. A GPU may already be training a later one.
    """

    exit_code = ExitCode.NUMERICS

    def __init__(self, text: str, step: int | None = None) -> None:
        self.step = step
        super().__init__(text)


def joined(failures: Sequence[MegatronError]) -> MegatronError:
    """Joins several errors, one line each, without duplicates.

    The result has their common type, if any. Otherwise flags determine the exit code, then data, then storage: the same
    command would fail again.
    """
    texts = list(dict.fromkeys(line for failure in failures for line in str(failure).splitlines()))
    kinds = {type(failure) for failure in failures}
    codes = {failure.exit_code for failure in failures}
    if kinds == {LaunchError}:
        return LaunchError("\n".join(texts))
    if ExitCode.USAGE in codes:
        return ConfigError(texts)
    if len(kinds) == 1:
        return kinds.pop()("\n".join(texts))
    return DataError("\n".join(texts)) if ExitCode.DATA in codes else StorageError("\n".join(texts))


class FailureReport(NamedTuple):
    """A failure as it is sent to other processes: the name of its type, and its text."""

    kind: str
    text: str


def describe_failure(failure: BaseException, kinds: Sequence[type[MegatronError]]) -> FailureReport:
    """Describes a failure for other processes by its most specific type in `kinds`."""
    for kind in type(failure).__mro__:
        if kind in kinds:
            return FailureReport(kind.__name__, str(failure))
    return FailureReport(type(failure).__name__, str(failure))


def rebuild_failure(
    report: Sequence[str], kinds: Sequence[type[MegatronError]], fallback: type[MegatronError], where: str = ""
) -> MegatronError:
    """Rebuilds an error described by another process; one of an unknown type becomes a `fallback` that names the type.

    Args:
        report: kind and text from `describe_failure`, also as a JSON list.
        where: prefix of the text, for example "rank 3: ".
    """
    kind, text = report
    for known in kinds:
        if known.__name__ == kind:
            return known(where + text)
    return fallback(f"{where}{kind}: {text}")


def raise_on_all_ranks(
    reports: Sequence[Sequence[str] | None],
    rank: int,
    own_failure: BaseException | None,
    kinds: Sequence[type[MegatronError]],
    fallback: type[MegatronError],
) -> None:
    """Raises the same failure on every rank if at least one failed, so that no rank waits for another.

    It is the failure whose type comes first in `kinds` (an unknown type counts as `fallback`), and among equals that of
    the lowest rank. The failed rank raises the original exception, the others rebuild it with the prefix "rank N: ". An
    interrupt of this rank is raised unchanged.

    Args:
        reports: one per rank, in rank order, the same on all ranks; None if a rank succeeded.
        rank: this rank.
        own_failure: the exception on this rank.
        kinds: the types that can be rebuilt.
    """
    if own_failure is not None and not isinstance(own_failure, Exception):
        raise own_failure
    names = [kind.__name__ for kind in kinds]
    unknown = names.index(fallback.__name__) if fallback in kinds else len(names)
    failures = [
        (names.index(report[0]) if report[0] in names else unknown, number, report)
        for number, report in enumerate(reports)
        if report is not None
    ]
    if not failures:
        return
    _, failed, report = min(failures, key=lambda entry: entry[:2])
    if own_failure is not None and failed == rank:
        raise own_failure
    where = f"rank {failed}: " if len(reports) > 1 else ""
    raise rebuild_failure(report, kinds, fallback, where) from own_failure
