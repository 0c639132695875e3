"""Trains random models in random parallel layouts, and compares each with one process.

python -m campaigns.run layouts --cases 1000 --seed 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from campaigns.campaign import Plan, Result
from campaigns.layouts.drawing import RANKS, Case, draw
from campaigns.layouts.training import RUNNING, Outcome, distance, train
from tests.helpers.ranks import RankFailure, run_ranks

_AT_ONCE = 16  # cases that are trained by the processes of one start
_START_SECONDS, _CASE_SECONDS = 120, 20


def run_cases(plan: Plan) -> Iterator[Result]:
    """Trains random combinations, a few at a time."""
    for first in range(0, len(plan.numbers), _AT_ONCE):
        seeds = [10_000 * plan.seed + number for number in plan.numbers[first : first + _AT_ONCE]]
        yield from results_of([draw(seed) for seed in seeds], plan.folder)


def results_of(cases: Sequence[Case], folder: Path) -> Iterator[Result]:
    """Trains the cases; those with the same number of ranks share their processes."""
    problems: dict[int, str] = {}
    alone = _trained(cases, 1, folder, problems, is_alone=True)
    for ranks in RANKS:
        some = [case for case in cases if case.ranks == ranks and case.seed in alone]
        divided = _trained(some, ranks, folder, problems, is_alone=False)
        for case in some:
            if case.seed in divided:
                yield _compared(case, divided[case.seed], alone[case.seed][0])
    yield from (_result(case, "failed", problems[case.seed]) for case in cases if case.seed in problems)


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
    if alone.refusal or outcomes[0].refusal:
        return _result(case, "refused")
    try:
        apart = distance(outcomes, alone, with_weights=not case.takes_signs)
    except ValueError as failure:
        return _result(case, "failed", str(failure))
    limits = case.limits
    values = dataclasses.astuple(apart)[:4]
    is_far = any(not value <= limit for value, limit in zip(values, limits, strict=True))  # a NaN is far
    problem = f"{apart}, limits {limits}" if is_far else ""
    if outcomes[0].differences:
        problem = f"copies differ: {outcomes[0].differences[:3]}"
    return _result(case, "equal", problem)


def _result(case: Case, outcome: str, problem: str = "") -> Result:
    return Result(case.seed % 10_000, case.numbers, outcome, problem and f"{case.text}\n{problem}")
