"""When a run is expected to end, on a clock that the test sets."""

from __future__ import annotations

from megatron.observe.report import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_known_before_a_step_was_timed() -> None:
    pace = Pace(Clock())
    assert pace.seconds_left(0, 10) is None
    pace.mark(0)
    assert pace.seconds_left(0, 10) is None


def test_the_first_step_counts_until_there_is_another() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.mark(100)
    clock.now += 50.0
    pace.mark(110)
    assert pace.seconds_left(110, 200) == 90 * 5.0
    clock.now += 10.0
    pace.mark(120)
    assert pace.seconds_left(120, 200) == 80 * 1.0


def test_all_later_steps_count_with_what_lies_between_them() -> None:
    clock = Clock()
    pace = Pace(clock)
    for step, seconds in enumerate([30.0, 1.0, 1.0, 4.0, 2.0]):
        clock.now += seconds
        pace.mark(step)
    assert pace.seconds_left(4, 10) == 6 * (1.0 + 4.0 + 2.0) / 3
    assert pace.seconds_left(12, 10) == 0.0


def test_a_step_is_marked_once() -> None:
    clock = Clock()
    pace = Pace(clock)
    for step in (0, 2, 2):
        clock.now += 2.0
        pace.mark(step)
    assert pace.seconds_left(2, 4) == 2.0
