"""Skipped data, and its effect on the progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.config import OptimConfig
from megatron.config.schedule import StepRange
from megatron.train.callbacks.numerics import SkippedBatches, SkippedRanges
from megatron.train.run import Run
from tests.train.samples import optim_config


class ConsumingRun:
    """As much of a run as moves its progress."""

    def __init__(self, progress: Progress, ranges: tuple[StepRange, ...] = (), optim: OptimConfig | None = None):
        self.config = SimpleNamespace(optim=optim or optim_config(), safety=SimpleNamespace(skip_ranges=ranges))
        self.progress = progress
        self.next_length = 10
        self.passed: list[Any] = []
        self.report = SimpleNamespace(skipped_batch=lambda *told: self.passed.append(told[1:]))

    skip_batches: Any = Run.skip_batches


def after_skipping(progress: Progress, *ranges: StepRange, optim: OptimConfig | None = None) -> Progress:
    run: Any = ConsumingRun(progress, ranges, optim)
    SkippedRanges().before_step(run)
    return run.progress


def test_a_range_moves_the_data_but_not_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    before = Progress(step=2, consumed_samples=16, consumed_tokens=160, skipped_steps=1)
    after = Progress(step=2, consumed_samples=40, consumed_tokens=400, skipped_steps=1)
    assert after_skipping(before, (3, 5)) == after
    assert "Skipped iterations 3 to 5 due to --skip-train-iteration-range flag." in capsys.readouterr().err


@pytest.mark.parametrize("step", [0, 1, 3, 4])
def test_other_iterations_pass_unchanged(step: int) -> None:
    progress = Progress(step=step, consumed_samples=8 * step)
    assert after_skipping(progress, (3, 5)) == progress


def test_a_ramp_up_continues_while_data_is_skipped() -> None:
    optim = optim_config(global_batch_size=8, rampup_batch_size=(2, 2, 12), train_samples=100)
    after = after_skipping(Progress(), (1, 4), optim=optim)
    # 2 samples a batch below 4 consumed, then 4 below 8, then 6 below 12
    assert after.consumed_samples == 2 + 2 + 4 + 6
    assert after.consumed_tokens == 10 * after.consumed_samples


def test_adjacent_ranges_are_skipped_separately() -> None:
    ranges = ((2, 2), (3, 4))
    first = after_skipping(Progress(step=1, consumed_samples=8), *ranges)
    assert first.consumed_samples == 16
    assert after_skipping(first.after(8, 8), *ranges).consumed_samples == 40


def test_a_run_without_ranges_has_no_part() -> None:
    for ranges in ((), ((1, 2),)):
        setup: Any = SimpleNamespace(config=SimpleNamespace(safety=SimpleNamespace(skip_ranges=ranges)))
        assert (SkippedRanges.of(setup) is not None) is bool(ranges)


def test_a_batch_of_failed_starts_is_passed_over_like_a_range_of_one_step() -> None:
    run: Any = ConsumingRun(Progress(step=2, consumed_samples=16, consumed_tokens=160))
    expected, callback = after_skipping(run.progress, (3, 3)), SkippedBatches((3, 7))
    callback.before_step(run)
    assert run.progress == expected
    assert callback.state(run) == {"passed_batches": ({"step": 3, "first_sample": 16, "last_sample": 23},)}
    run.progress = expected.after(8, 80)
    callback.before_step(run)
    assert run.progress == expected.after(8, 80) and len(run.passed) == 1


def test_two_batches_of_one_step_are_passed_over_one_after_the_other() -> None:
    run: Any = ConsumingRun(Progress())
    record: Any = SimpleNamespace(passed_batches=({"step": 1, "first_sample": 0, "last_sample": 7},))
    callback, engine = SkippedBatches((1, 2, 1)), run
    callback.restore(engine, run.progress, record)
    callback.before_step(run)
    assert run.progress == Progress(0, 16, 160)
    assert [(batch["first_sample"], batch["last_sample"], number) for batch, number in run.passed] == [
        (0, 7, 2),
        (8, 15, 3),
    ]
