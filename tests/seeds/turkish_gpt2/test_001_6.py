"""Scenario 001.6: what two tensor ranks of two stages saved goes on in any layout, without a conversion."""

from __future__ import annotations

import pytest

from tests.seeds.turkish_gpt2.layout_runs import LOADING, SAVED_AT, SAVING, STEPS, LayoutRuns

pytestmark = [pytest.mark.xdist_group("layouts"), pytest.mark.slow]


def test_001_6_another_layout_goes_on(layout_runs: LayoutRuns) -> None:
    uninterrupted = layout_runs.trained[SAVING]
    for layout in LOADING:
        steps = layout_runs.continued[layout]
        assert sorted(steps) == list(range(SAVED_AT + 1, STEPS + 1)), layout
        for step, record in steps.items():
            expected = uninterrupted[step]
            assert record["lm_loss"] == pytest.approx(expected["lm_loss"], abs=1e-4), f"{layout}, step {step}"
            for name in ("consumed_samples", "consumed_tokens", "learning_rate"):
                assert record[name] == expected[name], f"{layout}, step {step}: {name}"
