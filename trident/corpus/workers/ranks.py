"""The ranks that share one corpus job: a rank, a size and a function to exchange small values.

`corpus` has no process groups: a program on several ranks passes in the exchange.
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
    """Another rank of the job failed with an error of no specific type."""


@dataclass(frozen=True)
class JobRanks:
    """This process's rank in a shared job.

    Args:
        gather: collects a JSON-serialisable value from every rank, in rank order, on every rank.
    """

    rank: int
    size: int
    gather: Callable[[Any], list[Any]]

    @staticmethod
    def single() -> JobRanks:
        return JobRanks(0, 1, lambda value: [value])

    def run_on_all(self, work: Callable[[], Any]) -> list[Any]:
        """Runs `work` on every rank, waits for all, and returns their JSON-serialisable results in rank order.

        Raises:
            ConfigError, DataError, StorageError, JobError: a rank failed; every rank raises the same error.
        """
        value: Any = None
        failure: BaseException | None = None
        try:
            value = work()
        except BaseException as error:  # of any kind: otherwise the other ranks would wait forever
            failure = error
        report = None if failure is None else describe_failure(failure, _KINDS)
        outcomes = self.gather([report, value])
        raise_on_all_ranks([outcome[0] for outcome in outcomes], self.rank, failure, _KINDS, JobError)
        return [value for _, value in outcomes]

    def run_on_first(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on rank 0 and returns its JSON-serialisable result on every rank; all ranks raise its failure."""
        return self.run_on_all(work if self.rank == 0 else lambda: None)[0]  # type: ignore[no-any-return]
