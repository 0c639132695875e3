"""Differences of two checkpoints of any layouts."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from tests.checkpoint.made.fake_pieces import SHAPES, make_state
from tests.checkpoint.made.stored import save_checkpoint
from tests.helpers.networks import tiny_config
from trident.checkpoints import slices
from trident.checkpoints.differences import TensorDifference, compare, comparison_lines

FC2 = "decoder.layers.0.mlp.linear_fc2.weight"


def test_equal_tensors_in_other_pieces_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 28)
    first, second = (save_checkpoint(tmp_path / str(seed), make_state(), seed=seed) for seed in (1, 2))
    comparison = compare(first, second, with_moments=True)
    assert comparison.holds_same_tensors
    assert len(comparison.differences) == 3 * len(SHAPES)
    assert [change.field for change in comparison.config] == ["saving.save"]
    assert list(comparison_lines(comparison))[-1] == "EQUAL: all 12 tensors, bit for bit"


def test_differences_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 28)
    state = make_state()
    first = save_checkpoint(tmp_path / "a", state, step=4)
    state[FC2, "master"][2, 3] += 0.25
    state["scale", "exp_avg"] += 1
    model = dataclasses.replace(tiny_config(), num_layers=3)
    second = save_checkpoint(tmp_path / "b", state, step=5, model=model)
    comparison = compare(first, second)
    (apart,) = [entry for entry in comparison.differences if entry.different]
    values = state[FC2, "master"].double()
    assert (apart.name, apart.kind, apart.elements, apart.different) == (FC2, "weight", 120, 1)
    assert apart.largest_absolute == pytest.approx(0.25, rel=1e-6)
    after, before = float(values[2, 3]), float(values[2, 3]) - 0.25
    assert apart.largest_relative == pytest.approx(0.25 / max(abs(before), abs(after)), rel=1e-5)
    assert apart.relative_norm == pytest.approx(0.25 / float(make_state()[FC2, "master"].norm()), rel=1e-5)
    assert {change.field: (change.first, change.second) for change in comparison.config}["model.num_layers"] == (2, 3)
    assert [change.field for change in comparison.progress] == ["consumed_samples", "consumed_tokens", "step"]
    lines = list(comparison_lines(comparison))
    assert any(line.startswith(f"{FC2} | weight |") and " 1 of 120 | " in line for line in lines)
    assert "model.num_layers: 2 and 3" in lines
    assert lines[-1].startswith("DIFFERENT: 1 of 4 compared tensors (largest absolute difference 0.25)")
    assert compare(first, second, ["embedding*"]).holds_same_tensors
    assert sum(bool(entry.different) for entry in compare(first, second, with_moments=True).differences) == 2


def test_tensors_of_one_checkpoint_only_and_of_other_shapes(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path / "a", make_state({"x": (4, 6), "y": (3,), "z": (2,)}))
    second = save_checkpoint(tmp_path / "b", make_state({"x": (2, 2, 6), "y": (4,), "w": (2,)}))
    comparison = compare(first, second)
    assert (comparison.only_first, comparison.only_second) == (["z"], ["w"])
    assert [vars(change) for change in comparison.other_shape] == [{"field": "y", "first": [3], "second": [4]}]
    assert [entry.name for entry in comparison.differences] == ["x"]
    assert not comparison.holds_same_tensors
    lines = list(comparison_lines(comparison))
    assert {"only in the first: z", "only in the second: w", "of another shape: y [3] and [4]"} <= set(lines)
    assert lines[-1].endswith("and 3 that could not be compared")
    assert json.loads(json.dumps(comparison.to_json(), allow_nan=False))["only_second"] == ["w"]


def test_values_that_are_not_finite() -> None:
    difference = TensorDifference("x", "weight")
    nan, infinity = float("nan"), float("inf")
    difference.add(torch.tensor([nan, infinity, 1.0]), torch.tensor([nan, infinity, 1.0]))
    assert (difference.different, difference.largest_absolute, difference.relative_norm) == (0, 0.0, 0.0)
    difference.add(torch.tensor([nan, 1.0]), torch.tensor([1.0, infinity]))
    assert (difference.different, difference.largest_absolute, difference.largest_relative) == (2, math.inf, math.inf)
    assert difference.to_json()["largest_absolute"] is None
    types = TensorDifference("x", "weight")
    types.add(torch.tensor([1.0, 0.1], dtype=torch.bfloat16), torch.tensor([1.0, 0.1]))
    assert types.different == 1 and types.largest_absolute == pytest.approx(0.10009765625 - 0.1, rel=1e-4)
    zero = TensorDifference("x", "weight")
    zero.add(torch.zeros(2), torch.tensor([0.0, 2.0]))
    assert (zero.largest_relative, zero.relative_norm) == (1.0, math.inf)
