"""The errors a user may see, and the exit code each of them ends a program with.

An error text says what is wrong with its values and flags, what must hold, and what to do about it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple


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
    """Base class of the errors that are shown as text, without a traceback.

    Attributes:
        is_on_all_ranks: every rank has the same error, so that only one needs to show it.
    """

    exit_code = ExitCode.HUMAN
    is_on_all_ranks = False


_MOST_LETTERS = 4000


def _shortened(sentence: str) -> str:
    """The sentence without its middle, if it is too long to be read."""
    half = _MOST_LETTERS // 2
    return sentence if len(sentence) <= _MOST_LETTERS else f"{sentence[:half]} [...] {sentence[-half:]}"


def printable(value: object, letters: int = 200, *, quoted: bool = True) -> str:
    """A value from a file as a message may show it: short, and with nothing in it that steers a terminal.

    A text is shown in quotes and with escapes, so that it can neither begin a line nor pass for words of the message.

    Args:
        quoted: false leaves out the quotes of a text, where the message is about a word or a path.
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
    """Flags, entries of a config file or combinations of them that cannot be used.

    Args:
        problems: one sentence each, all of them shown; of one that repeats a huge value, the beginning and the end.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [_shortened(one) for one in ([problems] if isinstance(problems, str) else problems)]
        super().__init__("\n".join(self.problems))


class LaunchError(MegatronError):
    """The processes that were started cannot form the run: launcher, machine, layout or another job prevents it."""

    exit_code = ExitCode.USAGE


class PeerLostError(MegatronError):
    """Another rank of the run ended; saved checkpoints are intact, so the job can be started again as it is."""

    exit_code = ExitCode.REQUEUE


class HangError(MegatronError):
    """A rank of the run is stopped or stuck; saved checkpoints are intact, so the job can be started again as it is."""

    exit_code = ExitCode.HANG


class DataError(MegatronError):
    """A corpus, token or index file that is damaged, missing or does not fit the run."""

    exit_code = ExitCode.DATA


class StorageError(MegatronError):
    """A read or write that the file system refused; the text names the path and the reason."""

    exit_code = ExitCode.STORAGE


class TooManyFilesError(StorageError):
    """A file that could not be opened because too many are, in this process or on this machine."""


class CheckpointError(MegatronError):
    """A checkpoint that is damaged, missing or does not fit the run."""

    exit_code = ExitCode.STORAGE


class DamagedError(CheckpointError):
    """A checkpoint whose bytes are not those that were written; an older one may still be good."""


class ConversionError(MegatronError):
    """A model of another program that cannot be converted; names the field, tensor or file that is the reason."""

    exit_code = ExitCode.DATA


class OutOfMemoryError(MegatronError):
    """The memory of the device, or of the machine, was not enough."""


class NumericsError(MegatronError):
    """Training produced values that it cannot continue from.

    Args:
        step: the step that did; None if unknown. A GPU may be training a later one already.
    """

    exit_code = ExitCode.NUMERICS

    def __init__(self, text: str, step: int | None = None) -> None:
        self.step = step
        super().__init__(text)


def joined(failures: Sequence[MegatronError]) -> MegatronError:
    """One error with the texts of several, each on a line of its own and none twice.

    It is of their type if they share it. Else the flags decide the exit code, before data and then storage: what is
    wrong with them makes the same command fail again.
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
    """A failure in the form in which it is sent to another process: the name of its type, and its text."""

    kind: str
    text: str


def describe_failure(failure: BaseException, kinds: Sequence[type[MegatronError]]) -> FailureReport:
    """Describes a failure for other processes, as the nearest of its types that is among `kinds`."""
    for kind in type(failure).__mro__:
        if kind in kinds:
            return FailureReport(kind.__name__, str(failure))
    return FailureReport(type(failure).__name__, str(failure))


def rebuild_failure(
    report: Sequence[str], kinds: Sequence[type[MegatronError]], fallback: type[MegatronError], where: str = ""
) -> MegatronError:
    """The error that another process described; one of an unknown type becomes a `fallback` that names the type.

    Args:
        report: kind and text, as `describe_failure` gave them; also what JSON makes of that.
        where: put before the text, for example "rank 3: ".
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
    """Raises the same failure on every rank if at least one failed, so that none waits for another.

    It is the failure whose type comes first in `kinds` (an unknown type counts as `fallback`), and among equals the
    failure of the lowest rank. Its own rank raises the exception itself, the others rebuild it with "rank N: " before
    its text. An interrupt of this rank is raised as it is.

    Args:
        reports: of all ranks, in rank order, on every rank the same; None where a rank succeeded.
        rank: this rank.
        own_failure: what this rank caught.
        kinds: the types that are rebuilt as they were.
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
