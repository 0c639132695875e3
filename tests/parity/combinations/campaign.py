"""Trains random combinations and compares each with one process.

    python -m tests.parity.combinations.campaign --cases 1000 --seed 1
    python -m tests.parity.combinations.campaign --cases 1 --seed 17     plays the case of seed 17 again

Prints the largest differences as JSON, and each case that is further from one process than its limits; `--report` adds
a line for every case to a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.helpers.ranks import RankFailure, run_ranks
from tests.parity.combinations.drawing import RANKS, Case, draw
from tests.parity.combinations.training import RUNNING, Distance, Outcome, distance, train

_AT_ONCE = 16  # cases that are trained by the processes of one start
_START_SECONDS, _CASE_SECONDS = 120, 20


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Attributes:
        refusal: why nothing was trained; empty if it was.
        problem: what is wrong; empty if nothing is.
        apart: how far the layout is from one process.
    """

    case: Case
    refusal: str = ""
    problem: str = ""
    apart: Distance | None = None


def results_of(cases: Sequence[Case], folder: Path) -> Iterator[Result]:
    """Trains cases, those with as many ranks in the same processes."""
    problems: dict[int, str] = {}
    alone = _trained(cases, 1, folder, problems, is_alone=True)
    for ranks in RANKS:
        some = [case for case in cases if case.ranks == ranks and case.seed in alone]
        divided = _trained(some, ranks, folder, problems, is_alone=False)
        for case in some:
            if case.seed in divided:
                yield _compared(case, divided[case.seed], alone[case.seed][0])
    yield from (Result(case, problem=problems[case.seed]) for case in cases if case.seed in problems)


def _trained(
    cases: Sequence[Case], ranks: int, folder: Path, problems: dict[int, str], *, is_alone: bool
) -> dict[int, list[Outcome]]:
    """The outcomes of the ranks by seed; a case that ends its processes is a problem, and the others go on."""
    left = list(cases)
    while left:
        try:
            limit = _START_SECONDS + _CASE_SECONDS * len(left)
            by_rank = run_ranks(train, ranks, left, folder, is_alone, timeout_seconds=limit)
        except RankFailure as failure:
            seed = int((folder / RUNNING).read_text())
            [culprit] = [case for case in left if case.seed == seed]
            problems[seed] = f"{culprit.text}\n{failure}"
            left.remove(culprit)
        else:
            return {case.seed: [each[place] for each in by_rank] for place, case in enumerate(left)}
    return {}


def _compared(case: Case, outcomes: list[Outcome], alone: Outcome) -> Result:
    if refusal := alone.refusal or outcomes[0].refusal:
        return Result(case, refusal=refusal)
    try:
        apart = distance(outcomes, alone, with_weights=not case.takes_signs)
    except ValueError as failure:
        return Result(case, problem=f"{case.text}\n{failure}")
    limits = case.limits
    is_far = any(
        not value <= limit for value, limit in zip(dataclasses.astuple(apart)[:4], limits, strict=True)
    )  # a NaN is far
    text = f"{case.text}\n{apart}, limits {limits}" if is_far else ""
    if outcomes[0].differences:
        text = f"{case.text}\ncopies differ: {outcomes[0].differences[:3]}"
    return Result(case, problem=text, apart=apart)


def figures(results: Sequence[Result]) -> dict[str, object]:
    """What a campaign found, by dtype and whether the optimizer takes signs."""
    table: dict[str, object] = {"cases": len(results), "problems": sum(bool(each.problem) for each in results)}
    table["refused"] = sum(bool(each.refusal) for each in results)
    for name in dict.fromkeys(each.case.numbers for each in results):
        rows = [dataclasses.astuple(each.apart)[:4] for each in results if each.apart and each.case.numbers == name]
        if rows:
            names = ("loss", "first norm", "norm", "tensor")
            largest = dict(zip(names, np.max(rows, axis=0).tolist(), strict=True))
            table[name] = {"cases": len(rows), **largest}
    return table


def main() -> int:
    """Runs the campaign and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    found: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for first in range(asked.seed, asked.seed + asked.cases, _AT_ONCE):
            seeds = range(first, min(first + _AT_ONCE, asked.seed + asked.cases))
            for result in results_of([draw(seed, folder) for seed in seeds], folder):
                found.append(result)
                if result.problem:
                    print(result.problem, file=sys.stderr, flush=True)
                if asked.report is not None:
                    with asked.report.open("a") as report:
                        apart = result.apart and dataclasses.asdict(result.apart)
                        row = {"seed": result.case.seed, "numbers": result.case.numbers, "text": result.case.text}
                        report.write(json.dumps({**row, "refusal": result.refusal, "apart": apart}) + "\n")
    print(json.dumps(figures(found), indent=1))
    return int(any(each.problem for each in found))


if __name__ == "__main__":
    sys.exit(main())
