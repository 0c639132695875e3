"""When a run is expected to end, on a clock that the test sets."""

from __future__ import annotations

import pytest

from megatron.observe.report import Pace


@pytest.mark.parametrize(
    ("marks", "last", "seconds_left"),
    [
        ([], 10, None),
        ([(0.0, 0)], 10, None),
        ([(0.0, 100), (50.0, 110)], 200, 90 * 5.0),  # the first step counts until there is another
        ([(0.0, 100), (50.0, 110), (10.0, 120)], 200, 80 * 1.0),
        ([(30.0, 0), (1.0, 1), (1.0, 2), (4.0, 3), (2.0, 4)], 10, 6 * (1.0 + 4.0 + 2.0) / 3),
        ([(2.0, 0), (2.0, 2), (2.0, 2)], 4, 2.0),  # a step is marked once
        ([(2.0, 0), (2.0, 2)], 1, 0.0),
    ],
)
def test_the_time_left(marks: list[tuple[float, int]], last: int, seconds_left: float | None) -> None:
    now = [1000.0]
    pace = Pace(lambda: now[0])
    for seconds, step in marks:
        now[0] += seconds
        pace.mark(step)
    assert pace.seconds_left(marks[-1][1] if marks else 0, last) == seconds_left
