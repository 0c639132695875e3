"""Plans compared with published runs; docs/scaling.md has the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trident.plan.published import PUBLISHED, PublishedRun, replanned

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("run", PUBLISHED, ids=[run.name for run in PUBLISHED])
def test_a_plan_is_not_far_above_a_published_run(run: PublishedRun) -> None:
    """An upper bound, since links reach less than their data sheets say."""
    found = replanned(run)
    assert found.job.model_flops > 0
    assert 1.0 < found.utilization / run.utilization < 1.5
    assert f"| {run.name} | {run.devices:,} | {run.utilization:.1%} | {found.utilization:.1%} |" in GUIDE


def test_messages_between_stages_take_time_at_the_ends_of_a_step() -> None:
    """The first micro-batch goes through seven boundaries of eight stages and back."""
    run = next(run for run in PUBLISHED if "145.6B" in run.name)
    seconds = 2 * 7 * (2048 * 12288 * 2 / 25e9 + 10e-6)
    assert replanned(run).time.parts["pipeline messages"] == pytest.approx(seconds)
