"""The slowest rank: compared with its peers, since the report before, and named after three reports."""

from __future__ import annotations

from megatron.observe.straggler_report import PHASES, REPORTS_TO_NAME, RankTimings


def paces(steps: int, *milliseconds: tuple[int, int]) -> dict[int, tuple[int, int, int]]:
    """What each rank says after so many steps, each of which took it so long."""
    return {rank: (steps, steps * data, steps * work) for rank, (data, work) in enumerate(milliseconds)}


def test_the_slowest_rank_is_compared_with_the_median_since_the_last_report() -> None:
    comparison = RankTimings(lambda rank: 0)
    slowest = comparison.report(paces(100, (1, 50), (1, 52), (1, 51), (1, 90)))
    assert slowest is not None
    assert (slowest.rank, slowest.ranks, slowest.phase) == (3, 4, PHASES[1])
    assert (slowest.worst_seconds, slowest.median_seconds) == (0.09, 0.0515)
    assert (slowest.times, slowest.reports, slowest.is_straggler) == (1, 1, False)
    later = {rank: (200, pace[1] + 100, pace[2] + 5000) for rank, pace in paces(100, *[(1, 50)] * 4).items()}
    later[3] = (200, 200, 9000 + 5000)
    later[1] = (200, 100 + 4000, 10_000)
    slowest = comparison.report(later)
    assert slowest is not None and (slowest.rank, slowest.phase, slowest.ratio) == (1, PHASES[0], 40.0)


def test_a_rank_is_a_straggler_after_three_reports_in_a_row() -> None:
    comparison, named = RankTimings(lambda rank: 0), []
    milliseconds = 0
    for report in range(1, 7):
        milliseconds += 100 * (50 if report == 4 else 80)
        steps = 100 * report
        slowest = comparison.report({0: (steps, 0, 50 * steps), 1: (steps, 0, milliseconds), 2: (steps, 0, 51 * steps)})
        assert slowest is not None
        named.append(slowest.is_straggler)
    assert REPORTS_TO_NAME == 3 and named == [False, False, True, False, False, False]


def test_ranks_with_other_work_are_not_compared_and_silent_ones_left_out() -> None:
    comparison = RankTimings(lambda rank: rank // 2)
    slowest = comparison.report(paces(10, (0, 50), (0, 51), (0, 90), (0, 94)))
    assert slowest is not None and (slowest.rank, slowest.median_seconds) == (3, 0.092)
    assert comparison.report(paces(10, (0, 50), (0, 51), (0, 90), (0, 94))) is None, "nobody has made a step"
    assert RankTimings(lambda rank: rank).report(paces(10, (0, 50), (0, 90))) is None, "no two with the same work"
