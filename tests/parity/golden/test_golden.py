"""Loss curves of six layouts and three precisions are those that the repository keeps.

A change that is meant to move them writes them anew: `python -m tests.parity.golden.golden_curves --write`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.campaign_cases import DEFAULT_CASES, mark_campaign
from tests.parity.golden.golden_curves import (
    ENVIRONMENT,
    GOLDEN,
    LAYOUTS,
    REPEATED,
    REPEATED_STEPS,
    STEPS,
    TRAINED_STEPS,
    Curve,
    golden_text,
    read_golden,
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.xdist_group("golden"),
]  # one worker, so that the curves are trained once
ROOT = Path(__file__).resolve().parents[3]
# (loss, gradient norm). With other code paths of ATen, MKL and oneDNN than those fixed here, float32 moved by at most
# (4e-8, 1e-7) and bfloat16 by (2.4e-5, 1.4e-3): another machine must not fail, and a change of the arithmetic must.
TOLERANCES = {"fp32": (1e-6, 1e-5), "bf16": (1e-4, 1e-2), "bf16-accumulated-in-bf16": (1e-4, 1e-2)}
TRAINED = ("one", "dp2-zero1", "dp2-zero3", "tp2-pp2")


@pytest.fixture(scope="module")
def curves(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Curve]]:
    """The curves, trained now: those of all layouts in the campaign, otherwise of some."""
    layouts = TRAINED if request.config.getoption("--cases") <= DEFAULT_CASES else LAYOUTS
    path = tmp_path_factory.mktemp("golden") / "curves.json"
    command = [sys.executable, "-m", "tests.parity.golden.golden_curves", str(path), *layouts]
    environment = {**os.environ, **ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]
    found = json.loads(path.read_text())
    return {
        layout: {name: [tuple(step) for step in curve] for name, curve in runs.items()}
        for layout, runs in found.items()
    }


def test_every_layout_and_precision_has_its_curve() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.json")) == sorted(LAYOUTS)
    for layout in LAYOUTS:
        kept = read_golden(layout)
        assert kept.keys() == TOLERANCES.keys()
        assert all(len(curve) == STEPS for curve in kept.values())
        assert golden_text(kept) == (GOLDEN / f"{layout}.json").read_text()
        losses = [loss for loss, _ in kept["fp32"]]
        assert losses[-1] < losses[0] - 0.05, "the run must learn something"


@pytest.mark.full
@pytest.mark.parametrize("layout", mark_campaign(LAYOUTS, TRAINED))
def test_curves_are_those_that_are_kept(curves: dict[str, dict[str, Curve]], layout: str) -> None:
    for name, kept in read_golden(layout).items():
        trained = curves[layout][name]
        assert len(trained) == TRAINED_STEPS
        for step, (found, expected) in enumerate(zip(trained, kept[:TRAINED_STEPS], strict=True), start=1):
            for what, value, golden, tolerance in zip(("loss", "norm"), found, expected, TOLERANCES[name], strict=True):
                assert value == pytest.approx(golden, rel=tolerance), f"{name}, step {step}: {what}"


def test_two_runs_are_equal_bit_by_bit(curves: dict[str, dict[str, Curve]]) -> None:
    for layout, runs in curves.items():
        assert len(runs[f"{REPEATED}-again"]) == REPEATED_STEPS
        assert runs[f"{REPEATED}-again"] == runs[REPEATED][:REPEATED_STEPS], layout


def test_precisions_differ_and_layouts_do_not(curves: dict[str, dict[str, Curve]]) -> None:
    for layout, runs in curves.items():
        assert len({tuple(runs[name]) for name in TOLERANCES}) == len(TOLERANCES), layout
        for name, (loss_ratio, _) in TOLERANCES.items():
            losses, alone = ([loss for loss, _ in found[name]] for found in (runs, curves["one"]))
            assert losses == pytest.approx(alone, rel=loss_ratio), f"{layout}, {name}"
