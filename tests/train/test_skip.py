"""Data that is passed over, and what it does to the progress."""

from __future__ import annotations

import pytest

from megatron.checkpoint.record import Progress
from megatron.train.skip import pass_batches, skip_data
from tests.train.samples import optim_config


def test_a_range_moves_the_data_but_not_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    before = Progress(step=2, consumed_samples=16, consumed_tokens=160, skipped_steps=1)
    after = skip_data(before, optim_config(), ((3, 5),), 10)
    assert after == Progress(step=2, consumed_samples=40, consumed_tokens=400, skipped_steps=1)
    assert "Skipped iterations 3 to 5 due to --skip-train-iteration-range flag." in capsys.readouterr().err


@pytest.mark.parametrize("step", [0, 1, 3, 4])
def test_other_iterations_pass_unchanged(step: int) -> None:
    progress = Progress(step=step, consumed_samples=8 * step)
    assert skip_data(progress, optim_config(), ((3, 5),), 10) == progress


def test_a_ramp_up_continues_while_data_is_skipped() -> None:
    optim = optim_config(global_batch_size=8, rampup_batch_size=(2, 2, 12), train_samples=100)
    after = skip_data(Progress(), optim, ((1, 4),), 10)
    # 2 samples a batch below 4 consumed, then 4 below 8, then 6 below 12
    assert after.consumed_samples == 2 + 2 + 4 + 6
    assert after.consumed_tokens == 10 * after.consumed_samples


def test_adjacent_ranges_are_skipped_separately() -> None:
    ranges = ((2, 2), (3, 4))
    first = skip_data(Progress(step=1, consumed_samples=8), optim_config(), ranges, 1)
    assert first.consumed_samples == 16
    assert skip_data(first.after(8, 8), optim_config(), ranges, 1).consumed_samples == 40


def test_a_batch_of_failed_starts_is_passed_over_like_a_range_of_one_step() -> None:
    before = Progress(step=2, consumed_samples=16, consumed_tokens=160)
    after, passed = pass_batches(before, optim_config(), (3, 7), 10)
    assert after == skip_data(before, optim_config(), ((3, 3),), 10)
    assert passed == ({"step": 3, "first_sample": 16, "last_sample": 23},)
    assert pass_batches(after.after(8, 80), optim_config(), (3, 7), 10) == (after.after(8, 80), ())


def test_two_batches_of_one_step_are_passed_over_one_after_the_other() -> None:
    after, passed = pass_batches(Progress(), optim_config(), (1, 2, 1), 10)
    assert after == Progress(0, 16, 160)
    assert [(batch["first_sample"], batch["last_sample"]) for batch in passed] == [(0, 7), (8, 15)]
