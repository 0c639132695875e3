"""The interface of a campaign: it takes a plan and yields one result per case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

PROBLEM = "problem"


@dataclass(frozen=True)
class Plan:
    """The cases to run.

    Args:
        folder: an empty folder for the campaign's files.
        seed: together with its number, it determines a case.
        cases: the number of cases.
        case: only the case with this number.
        only: restricts the campaign to kinds of cases whose name contains this text.
        jobs: cases that may run at the same time, for campaigns that support it.
    """

    folder: Path
    seed: int = 1
    cases: int = 1
    case: int | None = None
    only: str = ""
    jobs: int = 1

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the cases."""
        return range(self.cases) if self.case is None else [self.case]

    def random(self, number: int) -> Random:
        """The random generator of a case."""
        return Random(f"case {number} of seed {self.seed}")

    def names(self, every: Sequence[str]) -> list[str]:
        """The kinds of cases that `only` allows.

        Raises:
            ValueError: no kind contains the text.
        """
        names = [name for name in every if self.only in name]
        if not names:
            raise ValueError(f"--only {self.only!r}: no kind contains it; the kinds are {', '.join(every)}")
        return names


@dataclass(frozen=True)
class Result:
    """The result of one case.

    Args:
        kind: its row in the summary.
        outcome: its column in the summary, if there is no problem.
        problem: empty if everything held.
        seconds: the figure whose median and maximum the summary shows; what it measures depends on the campaign.
    """

    number: int
    kind: str
    outcome: str
    problem: str = ""
    seconds: float | None = None


Campaign = Callable[[Plan], Iterator[Result]]


@dataclass
class Summary:
    """The counts of a campaign."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    problems: list[Result] = field(default_factory=list)

    @classmethod
    def of(cls, results: Iterator[Result]) -> Summary:
        """The summary of all results."""
        summary = cls()
        for result in results:
            summary.add(result)
        return summary

    def add(self, result: Result) -> None:
        """Counts one more case."""
        self.counts[result.kind, PROBLEM if result.problem else result.outcome] += 1
        if result.seconds is not None:
            self.seconds.append(result.seconds)
        if result.problem:
            self.problems.append(result)

    @property
    def cases(self) -> int:
        """The number of cases."""
        return sum(self.counts.values())

    def count(self, outcome: str) -> int:
        """The number of cases with an outcome."""
        return sum(count for (_, name), count in self.counts.items() if name == outcome)

    def table(self) -> list[str]:
        """One line per kind of case and one for all, a column per outcome, and the median and longest time."""
        kinds = sorted({kind for kind, _ in self.counts})
        outcomes = sorted({outcome for _, outcome in self.counts} - {PROBLEM}) + [PROBLEM]
        rows = [["", "cases", *outcomes]]
        for kind in kinds:
            counts = [self.counts[kind, outcome] for outcome in outcomes]
            rows.append([kind, *map(str, [sum(counts), *counts])])
        rows.append(["all", *map(str, [self.cases, *map(self.count, outcomes)])])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        if self.seconds:
            ordered = sorted(self.seconds)
            lines.append(f"seconds: median {ordered[len(ordered) // 2]:.2f}, longest {ordered[-1]:.2f}")
        return lines
