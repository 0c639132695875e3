"""Statistics of a summary equal those of the whole tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.errors import CheckpointError
from tests.checkpoint.made.fake_pieces import make_state
from tests.checkpoint.made.stored import save_checkpoint
from trident.checkpoints import slices
from trident.checkpoints.summary import ValueStats, summarize, summary_lines

FC2 = "decoder.layers.0.mlp.linear_fc2.weight"


def test_figures_do_not_depend_on_the_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 36)
    state = make_state()
    checkpoint = save_checkpoint(tmp_path, state)
    summary = summarize(checkpoint, with_moments=True)
    for entry in summary.tensors:
        for kind, stats in entry.stats.items():
            values = state[entry.tensor.name, kind].double()
            expected = [float(values.norm()), float(values.mean()), float(values.min()), float(values.max())]
            found = stats.to_json()
            assert [found[name] for name in ("norm", "mean", "smallest", "largest")] == pytest.approx(expected)
    masters = torch.cat([values.flatten() for (_, kind), values in state.items() if kind == "master"])
    assert summary.norm == pytest.approx(float(masters.norm()))
    assert summary.elements == masters.numel()
    assert summary.bytes_by_kind == dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), 4 * masters.numel())


def test_values_that_are_not_finite_are_counted() -> None:
    stats = ValueStats()
    stats.add(torch.tensor([float("nan"), 3.0, float("inf"), -4.0]))
    assert stats.to_json() == {"norm": 5.0, "mean": -0.5, "smallest": -4.0, "largest": 3.0, "not_finite": 2}
    empty = ValueStats()
    empty.add(torch.tensor([float("-inf")]))
    assert empty.to_json() == {"norm": None, "mean": None, "smallest": None, "largest": None, "not_finite": 1}


def test_a_summary_as_text_and_as_json(tmp_path: Path) -> None:
    state = make_state()
    state["scale", "exp_avg"].fill_(float("nan"))
    state["decoder.layers.0.mlp.linear_fc2.bias", "master"][1] = float("inf")
    checkpoint = save_checkpoint(tmp_path, state, check_finite=False)
    lines = list(summary_lines(summarize(checkpoint, with_moments=True)))
    assert any(line.startswith(f"{FC2} ") and "| [6, 20] | exp_avg_sq | F32" in line for line in lines)
    assert "step 4, 32 samples and 320 tokens consumed, 0 steps skipped, 4 updates" in lines[1]
    assert any(line.startswith("scale ") and line.endswith("1 not finite") for line in lines)
    assert any(", 1 not finite" in line for line in lines)
    assert lines[-1] == "model.num_layers = 2"
    assert any(line.startswith("4 tensors, 205 elements, norm of the weights ") for line in lines)
    value = json.loads(json.dumps(summarize(checkpoint, [FC2]).to_json(), allow_nan=False))
    (tensor,) = value["tensors"]
    assert (tensor["name"], tensor["shape"], tensor["elements"]) == (FC2, [6, 20], 120)
    assert set(tensor["kinds"]) == {"master", "exp_avg", "exp_avg_sq"} and "norm" not in tensor["kinds"]["exp_avg"]
    assert value["record"]["config"]["model"]["num_layers"] == 2


def test_a_summary_of_the_manifest_alone(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, make_state())
    for file in checkpoint.folder.glob("pieces_*"):
        file.unlink()
    lines = list(summary_lines(summarize(checkpoint, ["*fc2*"], with_values=False)))
    assert any("| master exp_avg exp_avg_sq | F32" in line for line in lines)
    assert any(line == "2 tensors, 126 elements" for line in lines)
    with pytest.raises(CheckpointError, match=r"no tensor of .* matches fc9\*.*decoder.layers.0"):
        summarize(checkpoint, ["*fc2*", "fc9*"])
