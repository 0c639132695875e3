"""The ranks that share one corpus job, as a rank, a size and a way to exchange small values.

`corpus` knows no process groups: a program on several ranks passes in the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.errors import (
    ConfigError,
    DataError,
    MegatronError,
    StorageError,
    describe_failure,
    raise_on_all_ranks,
)

Result = TypeVar("Result")

_KINDS: tuple[type[MegatronError], ...] = (ConfigError, DataError, StorageError)


class JobError(MegatronError):
    """Another rank of the job failed with an error that has no type of its own."""


@dataclass(frozen=True)
class JobRanks:
    """This process's rank among those that share a job.

    Args:
        gather: collects a JSON-able value from every rank, in rank order, on every rank.
    """

    rank: int
    size: int
    gather: Callable[[Any], list[Any]]

    @staticmethod
    def single() -> JobRanks:
        return JobRanks(0, 1, lambda value: [value])

    def run_on_all(self, work: Callable[[], Any]) -> list[Any]:
        """Runs `work` on every rank, waits for all, and returns their results (JSON-able) in rank order.

        Raises:
            ConfigError, DataError, StorageError, JobError: a rank failed; every rank raises the same then.
        """
        value: Any = None
        failure: BaseException | None = None
        try:
            value = work()
        except BaseException as error:  # of any kind: the other ranks must learn of it, or they wait forever
            failure = error
        report = None if failure is None else describe_failure(failure, _KINDS)
        answers = self.gather([report, value])
        raise_on_all_ranks([answer[0] for answer in answers], self.rank, failure, _KINDS, JobError)
        return [value for _, value in answers]

    def run_on_first(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on rank 0 and returns its result (JSON-able) on every rank; its failure is raised on all."""
        return self.run_on_all(work if self.rank == 0 else lambda: None)[0]  # type: ignore[no-any-return]
