"""Data that is passed over: which ranges count, and what they do to the progress."""

from __future__ import annotations

import pytest

from megatron.train.progress import Progress
from megatron.train.skip import SkipRanges
from tests.train.samples import optim_config


@pytest.mark.parametrize(
    ("texts", "ranges"),
    [
        ((), ()),
        (("3-5",), ((3, 5),)),
        (("10-11", "3-5"), ((3, 5), (10, 11))),
        (("3-5", "5-8"), ((3, 8),)),
        (("3-9", "4-5"), ((3, 9),)),
        (("3-5", "6-8"), ((3, 5), (6, 8))),
        (("7-7", "7-7"), ((7, 7),)),
    ],
)
def test_ranges_are_sorted_and_merged_where_they_overlap(texts: tuple[str, ...], ranges: tuple[object, ...]) -> None:
    assert SkipRanges.parse(texts, Progress()).ranges == ranges


def test_what_lies_behind_a_resume_is_dropped() -> None:
    assert SkipRanges.parse(("3-5", "10-11"), Progress(step=3)).ranges == ((10, 11),)
    assert SkipRanges.parse(("3-5",), Progress(step=2)).ranges == ((3, 5),)


def test_iterations_are_counted() -> None:
    assert SkipRanges.parse(("3-5", "10-11"), Progress()).iteration_count == 5
    assert SkipRanges().iteration_count == 0


def test_a_range_moves_the_data_but_not_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    before = Progress(step=2, consumed_samples=16, consumed_tokens=160, skipped_steps=1)
    after = SkipRanges(((3, 5),)).passed(before, optim_config(), 10)
    assert after == Progress(step=2, consumed_samples=40, consumed_tokens=400, skipped_steps=1)
    assert "Skipped iterations 3 to 5 due to --skip-train-iteration-range flag." in capsys.readouterr().err


@pytest.mark.parametrize("step", [0, 1, 3, 4])
def test_other_iterations_pass_unchanged(step: int) -> None:
    progress = Progress(step=step, consumed_samples=8 * step)
    assert SkipRanges(((3, 5),)).passed(progress, optim_config(), 10) == progress


def test_a_ramp_up_goes_on_while_data_is_passed_over() -> None:
    optim = optim_config(global_batch_size=8, rampup_batch_size=(2, 2, 12), train_samples=100)
    after = SkipRanges(((1, 4),)).passed(Progress(), optim, 10)
    # 2 samples a batch below 4 consumed, then 4 below 8, then 6 below 12
    assert after.consumed_samples == 2 + 2 + 4 + 6
    assert after.consumed_tokens == 10 * after.consumed_samples


def test_adjacent_ranges_are_two_stops() -> None:
    ranges = SkipRanges.parse(("2-2", "3-4"), Progress())
    first = ranges.passed(Progress(step=1, consumed_samples=8), optim_config(), 1)
    assert first.consumed_samples == 16
    assert ranges.passed(first.after(8, 8), optim_config(), 1).consumed_samples == 40
