"""Processes that do one corpus job together, seen as a rank, a size and a way to exchange small values.

The corpus room knows no process groups: a program that runs on several ranks hands the exchange in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.errors import ConfigError, DataError, MegatronError, StorageError

Result = TypeVar("Result")

_KINDS: tuple[type[MegatronError], ...] = (ConfigError, DataError, StorageError)


class CrewError(MegatronError):
    """Another rank of the job failed in a way that has no type of its own."""


@dataclass(frozen=True)
class Crew:
    """This process's place among those that share a job.

    Args:
        gather: collects a JSON-able value from every rank, in rank order, on every rank.
    """

    rank: int
    size: int
    gather: Callable[[Any], list[Any]]

    @staticmethod
    def alone() -> Crew:
        """A crew of this process only."""
        return Crew(0, 1, lambda value: [value])

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Runs `work` on this rank, waits for all, and returns all results (JSON-able) in rank order.

        Raises:
            ConfigError, DataError, StorageError, CrewError: a rank failed; every rank raises then, so none waits.
        """
        value: Any = None
        failure: BaseException | None = None
        try:
            value = work()
        except BaseException as error:  # whatever it is, the other ranks must hear of it or they wait for ever
            failure = error
        answers = self.gather([_described(failure), value])
        if failure is not None:
            raise failure
        for rank, (described, _) in enumerate(answers):
            if described is not None:
                raise _raised(rank, *described)
        return [answer for _, answer in answers]

    def on_first(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on rank 0 and returns its result (JSON-able) everywhere; its failure is everybody's."""
        return self.together(work if self.rank == 0 else lambda: None)[0]  # type: ignore[no-any-return]


def _described(failure: BaseException | None) -> tuple[str, str] | None:
    return None if failure is None else (type(failure).__name__, str(failure))


def _raised(rank: int, kind: str, text: str) -> MegatronError:
    for known in _KINDS:
        if known.__name__ == kind:
            return known(f"rank {rank}: {text}")
    return CrewError(f"rank {rank} failed ({kind}: {text}); the job was given up on all ranks.")
